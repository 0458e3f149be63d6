"""Every format gives the same records, streamed, and says file, line and byte where one is wrong."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from danlu.base.errors import UserError
from danlu.data.sources import Chunk, find_files, parse_chunk, read_chunks
from danlu.data.streams import BadRow

RECORDS = [{"instruction": "问候", "output": "你好 😀\u2028"}, {"instruction": "b", "output": 'quote " and, comma'}]


def read(path: Path, **options: Any) -> list[tuple[str, Any]]:
    """Return (place, record or fault) of all rows of a file."""
    settings: dict[str, Any] = {"encoding": "utf-8", "text_unit": "file"} | options
    found: list[tuple[str, Any]] = []
    for file in find_files([str(path)]):
        for chunk in read_chunks(file, **settings):
            if isinstance(chunk, Chunk):
                found += parse_chunk(chunk, settings["encoding"])
            else:
                found.append((chunk.where, chunk))
    return found


def records(path: Path, **options: Any) -> list[Any]:
    """Return the records; a fault fails the test."""
    rows = [row for _, row in read(path, **options)]
    assert not [row for row in rows if isinstance(row, BadRow)], rows
    return rows


def jsonl(rows: list[Any]) -> bytes:
    """Return JSON lines in UTF-8."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def csv_bytes(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    """Return csv with a header, every value quoted."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    quoted = [delimiter.join('"' + value.replace('"', '""') + '"' for value in line) for line in lines]
    return "\n".join(quoted).encode()


def parquet_bytes(rows: list[dict[str, str]]) -> bytes:
    """Return a parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def tar_bytes(members: list[tuple[str, bytes]]) -> bytes:
    """Return a tar of plain files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def long_window(data: bytes) -> bytes:
    """Return a zstd frame with a window beyond the decoder's default limit."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: jsonl(RECORDS),
    "a.jsonl.gz": lambda: gzip.compress(jsonl(RECORDS)),
    "a.jsonl.zst": lambda: zstandard.compress(jsonl(RECORDS[:1])) + zstandard.compress(jsonl(RECORDS[1:])),
    "b.jsonl.zst": lambda: long_window(jsonl(RECORDS)),
    "a.json": lambda: json.dumps(RECORDS, ensure_ascii=False, indent=2).encode(),
    "lines.json": lambda: jsonl(RECORDS),
    "a.csv": lambda: csv_bytes(RECORDS),
    "a.tsv": lambda: csv_bytes(RECORDS, "\t"),
    "a.parquet": lambda: parquet_bytes(RECORDS),
    "a.tar": lambda: tar_bytes([(f"{i}.json", jsonl([row])) for i, row in enumerate(RECORDS)]),
    "a.tar.gz": lambda: gzip.compress(tar_bytes([(f"{i}.json", jsonl([row])) for i, row in enumerate(RECORDS)])),
}


@pytest.mark.parametrize("name", FORMATS)
def test_br_179_every_format_gives_the_same_records(tmp_path: Path, name: str) -> None:
    """Plain or compressed, line-based or not, the records are equal."""
    (tmp_path / name).write_bytes(FORMATS[name]())
    assert records(tmp_path / name) == RECORDS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
@pytest.mark.parametrize("bom", [False, True])
def test_br_159_byte_order_mark_and_encodings(tmp_path: Path, name: str, encoding: str, bom: bool) -> None:
    """With or without a byte order mark, in UTF-8 and GB18030, keys and Chinese text come out exactly."""
    text = {"a.csv": 'instruction,output\n问候,"𠮷 你好"\n', "a.txt": "𠮷 你好"}.get(
        name, json.dumps({"instruction": "问候", "output": "𠮷 你好"}, ensure_ascii=False) + "\n"
    )
    (tmp_path / name).write_bytes((("\ufeff" if bom else "") + text).encode(encoding))
    expected = {"text": "𠮷 你好"} if name == "a.txt" else {"instruction": "问候", "output": "𠮷 你好"}
    assert records(tmp_path / name, encoding=encoding) == [expected]


def test_br_161_invalid_bytes_are_placed(tmp_path: Path) -> None:
    """A GB18030 line in a UTF-8 file is named with line and byte offset; the other lines are read."""
    first = jsonl([{"text": "一"}])
    bad = '{"text": "二"}\n'.encode("gb18030")
    (tmp_path / "a.jsonl").write_bytes(first + bad + jsonl([{"text": "三"}]))
    rows = read(tmp_path / "a.jsonl")
    assert [row for _, row in rows if not isinstance(row, BadRow)] == [{"text": "一"}, {"text": "三"}]
    fault = rows[1][1]
    assert fault.where.endswith("a.jsonl:2")
    assert fault.detail == f"byte offset {len(first) + 10}"
    assert 'encoding = "gb18030"' in str(fault.error())
    (tmp_path / "b.jsonl").write_bytes(bad)
    assert records(tmp_path / "b.jsonl", encoding="gb18030") == [{"text": "二"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_br_161_file_cut_inside_a_character(tmp_path: Path, name: str) -> None:
    """A file that ends in the middle of a 3-byte character is an error at that byte, never replaced text."""
    text = {"a.json": '[{"text": "', "a.csv": "text\n", "a.txt": ""}.get(name, '{"text": "')
    content = (text + "好").encode()[:-1]
    (tmp_path / name).write_bytes(content)
    fault = read(tmp_path / name)[-1][1]
    assert isinstance(fault, BadRow)
    assert fault.reason == "bytes are not utf-8"
    assert fault.detail == f"byte offset {len(text)}"


def test_utf16_is_refused_by_name(tmp_path: Path) -> None:
    """A UTF-16 file is recognised by its mark and refused with a hint."""
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("stem", ["a.jsonl", "a.json"])
def test_br_184_files_are_streamed(tmp_path: Path, stem: str, suffix: str) -> None:
    """Of a 30 MB file the first record is there after a block, and reading all takes under 20 MB."""
    line = json.dumps({"text": "好" * 1000}) + "\n"
    count = 30_000_000 // len(line)
    plain = line * count if stem == "a.jsonl" else "[" + ",".join([line] * count) + "]"
    compress: dict[str, Callable[[bytes], bytes]] = {
        "": bytes, ".gz": lambda data: gzip.compress(data, 1),
        ".zst": zstandard.ZstdCompressor(level=1).compress,
    }  # fmt: skip
    (tmp_path / (stem + suffix)).write_bytes(compress[suffix](plain.encode()))
    del plain
    file = find_files([str(tmp_path / (stem + suffix))])[0]
    tracemalloc.start()
    try:
        chunks = read_chunks(file, encoding="utf-8", text_unit="file")
        first = next(chunks)
        assert isinstance(first, Chunk)
        assert first.num_bytes < 4 << 20
        total = sum(1 for _ in parse_chunk(first, "utf-8"))
        del first
        for chunk in chunks:
            assert isinstance(chunk, Chunk)
            total += sum(1 for _ in parse_chunk(chunk, "utf-8"))
        assert total == count
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_block_borders_change_nothing(tmp_path: Path, block: int) -> None:
    """Lines, paragraphs, items and characters may straddle any block."""
    for name, expected in (("a.jsonl", RECORDS), ("a.json", RECORDS), ("a.csv", RECORDS)):
        (tmp_path / name).write_bytes(FORMATS[name]())
        assert records(tmp_path / name, block_bytes=block) == expected
    (tmp_path / "a.txt").write_bytes("第一\n段\n \n\n第二段\r\n\r\n第三\n".encode())
    assert [row["text"] for row in records(tmp_path / "a.txt", text_unit="paragraph", block_bytes=block)] == [
        "第一\n段",
        "第二段",
        "第三",
    ]
    assert [row["text"] for row in records(tmp_path / "a.txt", text_unit="line", block_bytes=block)] == [
        "第一",
        "段",
        "第二段",
        "第三",
    ]


def test_places_are_lines(tmp_path: Path) -> None:
    """Places count blank lines and lines inside quoted csv values."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n  \n{"a": 2}\nnot json\n[1]\n')
    rows = read(tmp_path / "a.jsonl")
    assert [place.rpartition(":")[2] for place, _ in rows] == ["1", "4", "5", "6"]
    assert [row.reason for _, row in rows[2:]] == ["malformed json", "row is not an object"]
    (tmp_path / "a.csv").write_text('a,b\n"x\ny",1\nz\n')
    rows = read(tmp_path / "a.csv")
    assert [place.rpartition(":")[2] for place, _ in rows] == ["2", "4"]
    assert rows[1][1].reason == "wrong number of csv columns"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1}, {"a": ', "malformed json"),
        ('[{"a": 1}', "malformed json"),
        ('[{"a": 1}, 3]', "row is not an object"),
        ('[{"a": 1}, nope, {"a": 2}]', "malformed json"),
    ],
)
def test_broken_json_is_a_fault_after_the_good_items(tmp_path: Path, text: str, reason: str) -> None:
    """Items before the damage are kept; the damage is named by item."""
    (tmp_path / "a.json").write_text(text)
    rows = read(tmp_path / "a.json")
    assert rows[0][1] == {"a": 1}
    assert rows[1][1].reason == reason


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_a_surrogate_pair_is_a_fault(tmp_path: Path, name: str) -> None:
    """An escaped emoji is text; half of one cannot be encoded and is named, not a crash in the tokenizer."""
    (tmp_path / name).write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    rows = [row for _, row in read(tmp_path / name)]
    assert rows[0] == {"text": "😀"}
    assert rows[1].reason == "text has half a surrogate pair"


def test_single_json_object_is_one_record(tmp_path: Path) -> None:
    """A json file may be one object."""
    (tmp_path / "a.json").write_text('{"a": {"b": [1, 2]}}')
    assert records(tmp_path / "a.json") == [{"a": {"b": [1, 2]}}]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.tar"])
def test_br_173_file_cut_short_is_a_fault(tmp_path: Path, name: str) -> None:
    """A compressed, parquet or tar file cut to 60 % ends in a fault that names it."""
    rows = [{"text": f"{i} {'x' * 200}{i * 7919}"} for i in range(200)]
    content = {
        "a.jsonl.gz": lambda: gzip.compress(jsonl(rows)), "a.jsonl.zst": lambda: zstandard.compress(jsonl(rows)),
        "a.parquet": lambda: parquet_bytes(rows),
        "a.tar": lambda: tar_bytes([(f"{i}.json", jsonl([row])) for i, row in enumerate(rows)]),
    }[name]()  # fmt: skip
    (tmp_path / name).write_bytes(content[: int(len(content) * 0.6)])
    found = [row for _, row in read(tmp_path / name)]
    faults = [row for row in found if isinstance(row, BadRow)]
    assert len(faults) == 1
    assert name in faults[0].where
    good = [row for row in found if isinstance(row, dict)]
    assert good == rows[: len(good)]
    if name == "a.tar":
        assert len(good) > 100
        assert "byte" in faults[0].where


def test_br_174_duplicate_tar_member(tmp_path: Path) -> None:
    """The same member twice is a fault naming shard and key; the first one counts."""
    (tmp_path / "a.tar").write_bytes(tar_bytes([("x.json", b'{"text": "1"}'), ("x.json", b'{"text": "2"}')]))
    rows = [row for _, row in read(tmp_path / "a.tar")]
    assert rows[-1] == {"text": "1"}
    assert rows[0].reason == "tar has the same member twice"
    assert "a.tar: byte" in rows[0].where
    assert "x.json" in rows[0].where


@pytest.mark.parametrize("kind", ["climb", "absolute", "symlink", "hardlink", "device", "huge", "empty"])
def test_br_246_hostile_tar_members(tmp_path: Path, kind: str) -> None:
    """Names that leave, links, devices, huge sizes and floods of empty members are faults; nothing is written."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        names = {"climb": "../evil.txt", "absolute": str(tmp_path / "abs.txt")}
        info = tarfile.TarInfo(names.get(kind, "a.txt"))
        types = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
        info.type = types.get(kind, tarfile.REGTYPE)
        info.linkname = "/etc/passwd" if kind in ("symlink", "hardlink") else ""
        if kind == "empty":
            for number in range(20_000):
                tar.addfile(tarfile.TarInfo(f"{number}.txt"))
        elif kind == "huge":
            info.size = 1 << 50
            tar.fileobj.write(info.tobuf())
        else:
            tar.addfile(info)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.tar").write_bytes(buffer.getvalue())
    before = sorted(tmp_path.rglob("*"))
    faults = [row for _, row in read(folder / "a.tar") if isinstance(row, BadRow)]
    assert faults
    assert "a.tar: byte" in faults[0].where
    assert sorted(tmp_path.rglob("*")) == before
    reasons = {
        "climb": "leaves the archive", "absolute": "leaves the archive", "symlink": "link", "hardlink": "link",
        "device": "device", "huge": "over", "empty": "empty members",
    }  # fmt: skip
    assert reasons[kind] in faults[0].reason


def test_tar_members_of_a_key_are_one_sample(tmp_path: Path) -> None:
    """`.json` fields and `.txt` text of one key are one record; other extensions are left out."""
    members = [("d/1.json", b'{"a": 1}'), ("d/1.txt", "好".encode()), ("d/1.jpg", b"\xff"), ("d/2.txt", b"b")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    assert records(tmp_path / "a.tar") == [{"a": 1, "text": "好"}, {"text": "b"}]


def test_inputs_are_found(tmp_path: Path) -> None:
    """Folders are searched recursively for known suffixes, patterns expand, both in sorted order."""
    for name in ("b.jsonl", "sub/a.csv", "notes.docx", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [Path(file.path).name for file in find_files([str(tmp_path)])] == ["b.jsonl", "a.csv"]
    assert [Path(file.path).name for file in find_files([str(tmp_path / "*.jsonl")])] == ["b.jsonl"]


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    """Nothing found, an unknown suffix and a file named twice are errors; `format` settles the suffix."""
    (tmp_path / "a.dat").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="no such file"):
        find_files([str(tmp_path / "x.jsonl")])
    with pytest.raises(UserError, match="unknown kind of file"):
        find_files([str(tmp_path / "a.dat")])
    assert find_files([str(tmp_path / "a.dat")], "jsonl")[0].format == "jsonl"
    with pytest.raises(UserError, match="twice"):
        find_files([str(tmp_path / "a.dat"), str(tmp_path)], "jsonl")


def test_a_malformed_csv_line_costs_that_line_only(tmp_path: Path) -> None:
    """Behind a line with a stray quote the rows go on, with the right line numbers."""
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n"abc"def,x\n3,4\n5\n')
    rows = read(tmp_path / "a.csv")
    assert [row if isinstance(row, dict) else row.reason for _, row in rows] == [
        {"a": "1", "b": "2"}, "malformed csv", {"a": "3", "b": "4"}, "wrong number of csv columns",
    ]  # fmt: skip
    assert [row.where for _, row in rows if isinstance(row, BadRow)] == [f"{tmp_path}/a.csv:3", f"{tmp_path}/a.csv:5"]


def test_hidden_folders_and_compressed_parquet(tmp_path: Path) -> None:
    """What an editor hides is no input; parquet behind gzip is refused instead of called damaged."""
    for name in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}\n')
    assert [Path(file.path).name for file in find_files([str(tmp_path)])] == ["a.jsonl"]
    (tmp_path / "b.parquet.gz").write_bytes(b"x")
    with pytest.raises(UserError, match="parquet"):
        find_files([str(tmp_path / "b.parquet.gz")])
