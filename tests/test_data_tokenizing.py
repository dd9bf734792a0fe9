"""Text in any format becomes the same tokens; what is wrong is said with file and line, and nothing half-written stays."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spes_p2p.data.local_files import find_hashes, open_corpus
from spes_p2p.data.manifest import read_manifest
from spes_p2p.data.pieces import root_of
from spes_p2p.data.tokenizers import END_OF_TEXT, check_tokenizer, load_tokenizer, train_tokenizer
from spes_p2p.data.tokenizing import Progress, describe_token_files, tokenize
from spes_p2p.errors import UserError

DOCUMENTS = ["The state of the Union is strong.\n", "łódź – “quotes”, 日本語, 🙂", f"it says {END_OF_TEXT} in the middle", "x"]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(DOCUMENTS * 3, 300).save(str(path))
    return path


def json_lines(documents: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 7, field: text}) + "\n" for text in documents).encode()


def write_parquet(path: Path, documents: list[str], field: str = "text") -> None:
    pq.write_table(pa.table({"id": range(len(documents)), field: documents}), path)


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.jsonl": lambda path, documents: path.write_bytes(json_lines(documents)),
    "a.jsonl.gz": lambda path, documents: path.write_bytes(gzip.compress(json_lines(documents))),
    "a.json.gz": lambda path, documents: path.write_bytes(gzip.compress(json_lines(documents))),
    "a.jsonl.zst": lambda path, documents: path.write_bytes(zstandard.compress(json_lines(documents))),
    "a.parquet": write_parquet,
}


def ids_of(folder: Path) -> list[int]:
    manifest = read_manifest(folder / "manifest.json")
    return np.concatenate(open_corpus(manifest, [folder])).tolist()


def expected_ids(tokenizer_json: Path, documents: list[str]) -> list[int]:
    tokenizer = load_tokenizer(tokenizer_json)
    return [i for text in documents for i in [*tokenizer.encode(text, add_special_tokens=False).ids, 0]]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_tokens(tmp_path: Path, tokenizer_json: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, DOCUMENTS)
    manifest = tokenize([tmp_path / name], tokenizer_json, tmp_path / "out")
    assert ids_of(tmp_path / "out") == expected_ids(tokenizer_json, DOCUMENTS)
    assert manifest == read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.files[0].dtype == "uint16"


def test_a_txt_file_is_one_document_and_files_keep_their_order(tmp_path: Path, tokenizer_json: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(len(DOCUMENTS))]
    for path, text in zip(paths, DOCUMENTS, strict=True):
        path.write_text(text, "utf-8")
    tokenize(paths[::-1], tokenizer_json, tmp_path / "out")
    assert ids_of(tmp_path / "out") == expected_ids(tokenizer_json, DOCUMENTS[::-1])


def test_documents_end_with_one_end_token_even_if_their_text_spells_it(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["", *DOCUMENTS, ""]) + b"\n\n")
    tokenize([tmp_path / "a.jsonl"], tokenizer_json, tmp_path / "out")
    assert ids_of(tmp_path / "out").count(0) == len(DOCUMENTS)
    text = Tokenizer.from_file(str(tokenizer_json)).decode(ids_of(tmp_path / "out"), skip_special_tokens=False)
    assert text == "".join(document + END_OF_TEXT for document in DOCUMENTS)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), shard_tokens=st.integers(1, 50))
def test_shards_hold_whole_documents_and_all_of_them(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_json: Path, sizes: list[int], shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    documents = ["x" * size for size in sizes]
    (folder / "a.jsonl").write_bytes(json_lines(documents))
    manifest = tokenize([folder / "a.jsonl"], tokenizer_json, folder, prefix="web_", shard_tokens=shard_tokens)
    arrays = open_corpus(manifest, [folder])
    assert np.concatenate(arrays).tolist() == expected_ids(tokenizer_json, documents)
    assert [file.path for file in manifest.files] == [f"web_000_{shard:06d}.npy" for shard in range(len(arrays))]
    for tokens in arrays:
        assert tokens[-1] == 0
        assert len(tokens) <= shard_tokens or np.count_nonzero(tokens == 0) == 1


def test_batches_change_nothing(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.data.tokenizing.BATCH_CHARACTERS", 40)
    monkeypatch.setattr("spes_p2p.data.documents.CHUNK_BYTES", 7)
    for name, write in WRITERS.items():
        write(tmp_path / name, DOCUMENTS)
        tokenize([tmp_path / name], tokenizer_json, tmp_path / "out", overwrite=True)
        assert ids_of(tmp_path / "out") == expected_ids(tokenizer_json, DOCUMENTS)


def test_zstd_frames_follow_each_other(tmp_path: Path, tokenizer_json: Path) -> None:
    frames = [zstandard.compress(json_lines([text])) for text in DOCUMENTS]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    tokenize([tmp_path / "a.jsonl.zst"], tokenizer_json, tmp_path / "out")
    assert ids_of(tmp_path / "out") == expected_ids(tokenizer_json, DOCUMENTS)


def test_another_field_holds_the_text(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS, "content"))
    write_parquet(tmp_path / "b.parquet", DOCUMENTS, "content")
    tokenize([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tokenizer_json, tmp_path / "out", text_field="content")
    assert ids_of(tmp_path / "out") == 2 * expected_ids(tokenizer_json, DOCUMENTS)


def test_progress_ends_with_all_that_was_written(tmp_path: Path, tokenizer_json: Path) -> None:
    WRITERS["a.jsonl.gz"](tmp_path / "a.jsonl.gz", DOCUMENTS)
    steps: list[Progress] = []
    manifest = tokenize([tmp_path / "a.jsonl.gz"], tokenizer_json, tmp_path / "out", on_progress=steps.append)
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    assert steps[-1] == Progress(len(DOCUMENTS), manifest.tokens, size, size)


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


BAD_INPUTS: dict[str, tuple[str, bytes, str]] = {
    "bad JSON": ("a.jsonl", json_lines(["fine", "fine"]) + b'{"text": "cut\n', "a.jsonl, line 3: not valid JSON"),
    "no object": ("a.jsonl", json_lines(["fine"]) + b'"text"\n', "a.jsonl, line 2: has no field 'text'"),
    "no such field": ("a.jsonl", json_lines(["fine"], "content"), "a.jsonl, line 1: has no field 'text'; rename"),
    "not a string": ("a.jsonl", b'{"text": 7}\n', "a.jsonl, line 1: field 'text' is int"),
    "lone surrogate": ("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1: field 'text' is not valid Unicode"),
    "not UTF-8": ("a.jsonl", b'\n{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8"),
    "txt not UTF-8": ("a.txt", b"caf\xe9", "a.txt: not UTF-8"),
    "UTF-16 without its mark": ("a.txt", "text".encode("utf-16-le"), "a.txt: has zero bytes, so it is UTF-16 or no text"),
    "nested deep": ("a.jsonl", b"[" * 200_000, "a.jsonl, line 1: nested too deep; each line is one object like"),
    "a huge number": ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "a.jsonl, line 1: cannot be read (Exceeds the limit"),
    "gzip cut": ("a.jsonl.gz", cut(gzip.compress(json_lines(DOCUMENTS))), "a.jsonl.gz: the gzip data is truncated"),
    "no gzip": ("a.jsonl.gz", json_lines(DOCUMENTS), "a.jsonl.gz: the gzip data is truncated or damaged"),
    "zstd cut": ("a.jsonl.zst", cut(zstandard.compress(json_lines(DOCUMENTS))), "a.jsonl.zst: the zstd data is truncated"),
    "no zstd": ("a.jsonl.zst", json_lines(DOCUMENTS), "a.jsonl.zst: the zstd data is damaged"),
    "no parquet": ("a.parquet", json_lines(DOCUMENTS), "a.parquet: not a complete parquet file"),
    "unknown format": ("a.csv", b"text\n", "a.csv: unknown format"),
    "empty file": ("a.jsonl", b"", "a.jsonl: no documents"),
    "empty documents": ("a.jsonl", json_lines(["", ""]), "a.jsonl: no documents"),
    "empty gzip": ("a.jsonl.gz", b"", "a.jsonl.gz: no documents"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path, tokenizer_json: Path, name: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.data.tokenizing.BATCH_CHARACTERS", 1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        tokenize([tmp_path / name], tokenizer_json, tmp_path / "out")
    assert str(error.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_parquet_file_without_the_field_or_with_other_values_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    write_parquet(tmp_path / "a.parquet", DOCUMENTS, "content")
    with pytest.raises(UserError, match=r"a\.parquet: has no column 'text', only id, content"):
        tokenize([tmp_path / "a.parquet"], tokenizer_json, tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.parquet, row 1: field 'id' is int"):
        tokenize([tmp_path / "a.parquet"], tokenizer_json, tmp_path / "out", text_field="id")


def test_a_missing_input_is_refused_before_anything_is_read(tmp_path: Path, tokenizer_json: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl: no such file"):
        tokenize([tmp_path / "missing.jsonl"], tokenizer_json, tmp_path / "out")
    with pytest.raises(UserError, match="no input files"):
        tokenize([], tokenizer_json, tmp_path / "out")


def test_a_pipe_is_refused_before_anything_is_read(tmp_path: Path, tokenizer_json: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.txt: not a regular file"):
        tokenize([tmp_path / "a.txt"], tokenizer_json, tmp_path / "out")


def test_token_files_are_replaced_only_when_asked(tmp_path: Path, tokenizer_json: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(json_lines(DOCUMENTS))
    tokenize([source], tokenizer_json, out, shard_tokens=1)
    with pytest.raises(UserError, match="out: already contains token files"):
        tokenize([source], tokenizer_json, out)
    tokenize([source], tokenizer_json, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["000_000000.npy", "000_000000.npy.hashes", "manifest.json"]


def test_a_failed_replacement_leaves_the_old_corpus(tmp_path: Path, tokenizer_json: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(json_lines(DOCUMENTS))
    tokenize([source], tokenizer_json, out)
    source.write_bytes(json_lines(DOCUMENTS) + b"{")
    with pytest.raises(UserError, match="line 5"):
        tokenize([source], tokenizer_json, out, overwrite=True)
    assert ids_of(out) == expected_ids(tokenizer_json, DOCUMENTS)
    assert sorted(path.name for path in out.iterdir()) == ["000_000000.npy", "000_000000.npy.hashes", "manifest.json"]


def test_two_corpora_share_a_folder_by_prefix(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    for prefix in ("train_", "held_out_"):
        tokenize([tmp_path / "a.jsonl"], tokenizer_json, tmp_path / "out", prefix=prefix)
    names = {"000_000000.npy", "000_000000.npy.hashes", "manifest.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {p + n for p in ("train_", "held_out_") for n in names}


@pytest.mark.long
def test_a_dtype_that_does_not_hold_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    tokenizer.add_tokens([f"<{number}>" for number in range(2**16)])
    tokenizer.save(str(tmp_path / "big.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines(["<65500>"]))
    with pytest.raises(UserError, match=r"big\.json.*uint16"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "big.json", tmp_path / "out", dtype="uint16")
    assert tokenize([tmp_path / "a.jsonl"], tmp_path / "big.json", tmp_path / "out").files[0].dtype == "uint32"
    assert max(ids_of(tmp_path / "out")) > 2**16


def test_existing_token_files_get_a_manifest_and_stay_as_they_are(tmp_path: Path, tokenizer_json: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 1000)
    ids.astype("<u4").tofile(tmp_path / "part-000_000000.npy")
    ids.astype("<u2").tofile(tmp_path / "part-000_000001.npy")
    before = [path.read_bytes() for path in sorted(tmp_path.glob("*.npy"))]
    steps: list[tuple[int, int]] = []
    describe_token_files(
        sorted(tmp_path.glob("*.npy")), tokenizer_json, tmp_path / "manifest.json",
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[-1] == (1000 * 4 + 1000 * 2,) * 2
    assert ids_of(tmp_path) == ids.tolist() * 2
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.npy"))] == before
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"part-000_000000\.npy.*uint32"):
        describe_token_files(sorted(tmp_path.glob("*.npy")), tokenizer_json, tmp_path / "manifest.json", dtype="uint16")
    assert not (tmp_path / "manifest.json").exists()


def test_a_tokenizer_has_an_identity(tokenizer_json: Path) -> None:
    identity = check_tokenizer(tokenizer_json, END_OF_TEXT, 300)
    assert (identity.vocab_size, identity.eos_token_id) == (300, 0)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for path, eos, size, message in [
        (tokenizer_json, "</s>", 300, "has no token '</s>'"),
        (tokenizer_json, END_OF_TEXT, 299, "has 300 ids, the model only 299"),
        (tmp_path / "broken.json", END_OF_TEXT, 300, "not a tokenizer.json"),
        (tmp_path / "missing.json", END_OF_TEXT, 300, "cannot read the tokenizer"),
    ]:
        with pytest.raises(UserError, match=rf"{path.name}: {message}"):
            check_tokenizer(path, eos, size)


def test_a_tokenizer_that_would_cut_or_pad_does_not(tmp_path: Path, tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "cutting.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    tokenize([tmp_path / "a.jsonl"], tmp_path / "cutting.json", tmp_path / "out")
    assert ids_of(tmp_path / "out") == expected_ids(tokenizer_json, DOCUMENTS)


def test_files_have_the_same_pieces_whether_they_are_written_or_described(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    made = tokenize([tmp_path / "a.jsonl"], tokenizer_json, tmp_path, shard_tokens=20)
    assert len(made.files) > 1
    described = describe_token_files([tmp_path / file.path for file in made.files], tokenizer_json, tmp_path / "again.json")
    assert described.files == made.files
    assert [root_of(find_hashes(file, [tmp_path]) or b"") for file in made.files] == [file.pieces_sha256 for file in made.files]


def test_token_files_that_are_published_get_their_url_and_a_list_of_hashes(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    made = tokenize([tmp_path / "a.jsonl"], tokenizer_json, tmp_path / "tokens", url="s3://bucket/x")
    assert [file.url for file in made.files] == ["s3://bucket/x/000_000000.npy"]
    (tmp_path / "tokens/000_000000.npy.hashes").unlink()
    files = [tmp_path / "tokens/000_000000.npy"]
    described = describe_token_files(files, tokenizer_json, tmp_path / "again.json", url="https://host/x/")
    assert [file.url for file in described.files] == ["https://host/x/tokens/000_000000.npy"]
    assert [root_of(find_hashes(file, [tmp_path]) or b"") for file in described.files] == [made.files[0].pieces_sha256]


def test_a_manifest_names_no_path_of_the_owners_machine(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    np.arange(100, dtype="<u2").tofile(tmp_path / "there/a.npy")
    with pytest.raises(UserError, match=r"there/a\.npy: outside the manifest's folder"):
        describe_token_files([tmp_path / "there/a.npy"], tokenizer_json, tmp_path / "here/manifest.json")
    with pytest.raises(UserError, match=r"there/no\.npy: no such file"):
        describe_token_files([tmp_path / "there/no.npy"], tokenizer_json, tmp_path / "here/manifest.json")
    (tmp_path / "here/b.npy").symlink_to(tmp_path / "there/a.npy")
    monkeypatch.chdir(tmp_path / "here")
    manifest = describe_token_files([tmp_path / "here/b.npy"], tokenizer_json, Path("manifest.json"))
    assert [file.path for file in manifest.files] == ["b.npy"]
