import pytest

from corral.domain.ids import is_id, new_id, time_of, ulid_of
from corral.domain.quantities import format_bytes, format_seconds, parse_seconds, parse_size, shown


def test_an_id_is_prefix_and_26_lower_case_characters():
    made = new_id("run", 1_700_000_000_123, bytes(range(10)))
    assert made == "run_01hf7yat3v000g40r40m30e209"
    assert is_id(made, "run") and not is_id(made, "sbx")
    assert time_of(made) == 1_700_000_000_123
    assert len(ulid_of(made)) == 26


def test_ids_sort_by_time():
    times = [0, 1, 999, 1000, 2**40, 2**48 - 1]
    made = [new_id("exe", t, b"\xff" * 10 if i % 2 else bytes(10)) for i, t in enumerate(times)]
    assert sorted(made) == made


@pytest.mark.parametrize(
    "text",
    ["", "run", "run_", "run_01HF7YAT3V000G40R40M30E209", "run_../../../../etc/passwd0000", "run_0" * 6, "run_8" + "0" * 25,
     "run_01hf7yat3v000g40r40m30e20", "run_01hf7yat3v000g40r40m30e2099", "run_01hf7yat3v000g40r40m30e20u", "run_" + "٠" * 26],
)  # fmt: skip
def test_nothing_else_passes_for_an_id(text):
    assert not is_id(text, "run")


@pytest.mark.parametrize("now_ms, entropy", [(-1, bytes(10)), (2**48, bytes(10)), (0, bytes(9)), (0, bytes(11))])
def test_an_id_of_bad_parts_is_a_mistake(now_ms, entropy):
    with pytest.raises(ValueError):
        new_id("run", now_ms, entropy)


@pytest.mark.parametrize(
    "value, size",
    [(0, 0), (1024, 1024), ("1024", 1024), ("1K", 1024), ("512M", 512 * 2**20), ("512m", 512 * 2**20), ("2G", 2**31)],
)
def test_sizes_are_integers_with_binary_units(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value, words",
    [("1.5G", "1536M"), ("512MB", "512M"), ("512MiB", "512M"), ("512Mi", "512M"), ("1TB", "1024G"), ("", "512M"), ("M", "512M"),
     ("-1", "512M"), ("1 G", "512M"), ("0x10", "512M"), ("1e3", "512M"), ("٣", "512M"), ("1K1", "512M"), (True, "true"),
     (None, "null"), (1.5, "1.5"), (-1, "negative"), (2**63, "63 bits"), ("9999999999999999999G", "63 bits"), ([], "a list"),
     pytest.param(10**5000, "63 bits", id="huge"), ("9" * 10_000, "512M")],
)  # fmt: skip
def test_a_bad_size_is_refused_with_what_would_be_right(value, words):
    with pytest.raises(ValueError, match=words):
        parse_size(value)


@pytest.mark.parametrize("value, seconds", [(2, 2.0), (0.5, 0.5), ("1.5", 1.5), ("60", 60.0), (".5", 0.5), (0, 0.0)])
def test_times_are_decimal_seconds(value, seconds):
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize(
    "value",
    ["", "x", "1s", "1e3", "nan", "inf", "-1", " 1", -1, -0.5, float("nan"), float("inf"), True, None, [], 10**400],
)
def test_a_bad_time_is_refused(value):
    with pytest.raises(ValueError):
        parse_seconds(value)


def test_sizes_and_times_read_well_in_sentences():
    assert [format_bytes(n) for n in (0, 1, 12, 1024, 256 * 2**20, 3 * 2**29, 10**6)] == [
        "0 bytes", "1 byte", "12 bytes", "1 KiB", "256 MiB", "1.5 GiB", "976.6 KiB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (2, 0.5, 60.0, 0.05, 1.25, 0)] == [
        "2 s",
        "0.5 s",
        "60 s",
        "50 ms",
        "1.25 s",
        "0 s",
    ]


def test_a_shown_value_is_short_and_can_be_encoded():
    assert shown("a" * 100) == f"'{'a' * 60}…'"
    assert shown("\udc80\n\x1b[31m").encode() == b"'\\udc80\\n\\x1b[31m'"
    assert shown(10**5000) == "a number of more than 30 digits"
