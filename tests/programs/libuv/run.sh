# libuv from its source archive: autogen, configure, make, and its own tests, each a process of its own. Prints TAP.
set -u
here=$(cd "$(dirname "$0")" && pwd)
t() { name=$1; shift; if "$@" >"$here/log.txt" 2>&1; then echo "ok - $name"; else echo "not ok - $name"; tail -8 "$here/log.txt" | sed 's/^/# /'; fi; }
mkdir -p /workspace/libuv && cd /workspace/libuv && tar -xf "$here/source.tar" --strip-components=1 || exit 9
ls -d . >/dev/null 2>&1 || { mkdir -p "$here/bin" && cp "$here/ls.py" "$here/bin/ls" && PATH=$here/bin:$PATH; }
t autogen sh autogen.sh
t configure ./configure --disable-static --prefix=/workspace/installed
t make make -j2
t "make install" make install
t "make test/run-tests" make -j2 test/run-tests
# The time limits of its tests are those of a machine that does nothing else.
export UV_TEST_TIMEOUT_MULTIPLIER="${UV_TEST_TIMEOUT_MULTIPLIER:-10}"
./test/run-tests </dev/null
[ $? -lt 128 ]  # else it says how many failed
