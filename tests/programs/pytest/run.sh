# 1 000 tests of pytest: fixtures, parameters, temporary directories, output that is captured, processes. Prints TAP.
cd "$(dirname "$0")" || exit 9
mkdir -p many
python3 - <<'P'
for module in range(10):
    with open(f"many/test_{module}.py", "w") as file:
        file.write("import os, subprocess, sys, time, pytest\n\n@pytest.fixture\ndef place(tmp_path):\n    (tmp_path / 'a').write_text('ä 你好')\n    return tmp_path\n")
        file.write("@pytest.mark.parametrize('n', range(90))\ndef test_sum(n): assert sum(range(n)) == n * (n - 1) // 2\n")
        file.write("def test_place(place): assert (place / 'a').read_text() == 'ä 你好'\n")
        file.write("def test_child(): assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout == '1\\n'\n")
        file.write("def test_captured(capfd):\n    os.system('echo hi')\n    assert capfd.readouterr().out == 'hi\\n'\n")
        file.write("def test_environment(monkeypatch):\n    monkeypatch.setenv('TZ', 'Asia/Tokyo'); time.tzset(); assert time.localtime(0).tm_hour == 9\n    monkeypatch.setenv('TZ', 'UTC'); time.tzset()\n")
        file.write("@pytest.mark.parametrize('n', range(6))\ndef test_link(tmp_path, n):\n    (tmp_path / 'l').symlink_to('x'); os.mkfifo(tmp_path / 'p'); assert os.readlink(tmp_path / 'l') == 'x'\n")
P
PYTHONPATH=site python3 -m pytest -q -p no:cacheprovider --junit-xml results.xml many >log.txt 2>&1 || sed 's/^/# /' log.txt | tail -20
python3 - <<'P'
import xml.etree.ElementTree as tree
for case in tree.parse("results.xml").iter("testcase"):
    bad = case.find("failure") is not None or case.find("error") is not None
    print("not ok" if bad else "ok", "-", case.get("classname") + "." + case.get("name"))
P
