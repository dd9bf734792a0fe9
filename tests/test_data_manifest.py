"""Only the token files that the campaign names are trained on; whatever else lies there is refused by name."""

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from spes_p2p.data.local_files import check_local, find_local, locate_file, open_corpus
from spes_p2p.data.manifest import Manifest, TokenFile, check_vocabulary, publish_at, read_manifest, write_manifest
from spes_p2p.errors import UserError

VOCAB = 100


def write_tokens(path: Path, ids: np.ndarray, dtype: Literal["uint16", "uint32"] = "uint16") -> TokenFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = ids.astype(f"<u{np.dtype(dtype).itemsize}").tobytes()
    path.write_bytes(content)
    return TokenFile(path.name, hashlib.sha256(content).hexdigest(), len(ids), dtype, "cd" * 32)


def manifest_of(*files: TokenFile) -> Manifest:
    return Manifest("ab" * 32, VOCAB, 0, sum(file.tokens for file in files), files)


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, 500)


@pytest.fixture
def manifest(tmp_path: Path, ids: np.ndarray) -> Manifest:
    return manifest_of(write_tokens(tmp_path / "a.npy", ids[:300]), write_tokens(tmp_path / "b.npy", ids[300:], "uint32"))


def test_a_manifest_survives_its_file(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(manifest, tmp_path / "manifest.json")
    again = read_manifest(tmp_path / "manifest.json")
    assert again == manifest
    assert again.to_json() == (tmp_path / "manifest.json").read_text()


def test_the_corpus_is_what_the_manifest_names(tmp_path: Path, manifest: Manifest, ids: np.ndarray) -> None:
    assert np.array_equal(np.concatenate(open_corpus(manifest, [tmp_path])), ids)


def test_a_file_may_be_absent_but_not_wrong(tmp_path: Path, manifest: Manifest) -> None:
    first, second = manifest.files
    assert find_local(manifest, [tmp_path]) == {first: tmp_path / "a.npy", second: tmp_path / "b.npy"}
    assert find_local(manifest, []) == {}
    (tmp_path / "b.npy").unlink()
    assert find_local(manifest, [tmp_path]) == {first: tmp_path / "a.npy"}
    (tmp_path / "b.npy").write_bytes(b"\0" * 8)
    with pytest.raises(UserError, match="truncated"):
        find_local(manifest, [tmp_path])


def test_a_file_that_is_published_need_not_lie_on_the_owners_machine(tmp_path: Path, manifest: Manifest) -> None:
    published = manifest_of(*publish_at(manifest.files, "https://example.org/tokens"))
    for made in (manifest, published):
        check_local(made, [tmp_path])
    (tmp_path / "b.npy").unlink()
    check_local(published, [tmp_path])
    with pytest.raises(UserError, match=r"b\.npy: this token file of the campaign is not in"):
        check_local(manifest, [tmp_path])


def test_a_url_is_below_the_prefix_and_part_of_the_manifest(tmp_path: Path, manifest: Manifest) -> None:
    files = (replace(manifest.files[0], path="deep/a b.npy"),)
    for prefix, url in (("https://host/x/", "https://host/x/deep/a%20b.npy"), ("s3://bucket", "s3://bucket/deep/a b.npy")):
        published = manifest_of(*publish_at(files, prefix))
        assert [file.url for file in published.files] == [url]
        write_manifest(published, tmp_path / "m.json")
        assert read_manifest(tmp_path / "m.json") == published
    assert "url" not in manifest.to_json()


@pytest.mark.parametrize("change", [
    {"tokens": 499}, {"tokens": 0}, {"vocab_size": "100"}, {"tokenizer_sha256": "short"}, {"files": []}, {"surprise": 1},
    {"eos_token_id": -1}])
def test_a_malformed_manifest_is_refused(manifest: Manifest, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^m\.json: .*"):
        Manifest.from_json(json.dumps(asdict(manifest) | change), "m.json")


@pytest.mark.parametrize("change", [{"surprise": 1}, {"tokens": "300"}, {"dtype": "int64"}, {"path": ""}, {"sha256": "short"},
    {"path": "/etc/passwd"}, {"path": "../a.npy"}, {"path": "a/../../b.npy"}, {"pieces_sha256": None}, {"url": ""},
    {"url": "file:///etc/passwd"}, {"url": "/etc/passwd"}, {"url": "local://a"}, {"url": "https://"}, {"url": "https://a\nb"}])
def test_a_malformed_file_entry_is_refused(manifest: Manifest, change: dict[str, object]) -> None:
    raw = asdict(manifest)
    raw["files"] = [raw["files"][0] | change, raw["files"][1]]
    with pytest.raises(UserError, match=r"^m\.json: .*files\.0"):
        Manifest.from_json(json.dumps(raw), "m.json")


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    for name in ("text.json", "missing.json"):
        with pytest.raises(UserError, match=name):
            read_manifest(tmp_path / name)


def test_files_are_found_by_path_or_by_name_in_any_folder(tmp_path: Path, ids: np.ndarray) -> None:
    file = replace(write_tokens(tmp_path / "there" / "deep" / "a.npy", ids), path="deep/a.npy")
    assert locate_file(file, [tmp_path, tmp_path / "there"]) == tmp_path / "there" / "deep" / "a.npy"
    assert locate_file(file, [tmp_path / "there" / "deep"]) == tmp_path / "there" / "deep" / "a.npy"


def test_a_namesake_of_another_length_is_passed_over(tmp_path: Path, ids: np.ndarray) -> None:
    write_tokens(tmp_path / "held_out" / "a.npy", ids[:10])
    file = write_tokens(tmp_path / "train" / "a.npy", ids)
    assert locate_file(file, [tmp_path / "held_out", tmp_path / "train"]) == tmp_path / "train" / "a.npy"


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "b.npy").unlink()
    with pytest.raises(UserError, match=rf"b\.npy.*{tmp_path}"):
        locate_file(manifest.files[1], [tmp_path])


def test_a_cut_file_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    os.truncate(tmp_path / "a.npy", 598)
    with pytest.raises(UserError, match=r"a\.npy: has 299 uint16 ids, the manifest says 300"):
        open_corpus(manifest, [tmp_path])


def test_a_changed_file_is_refused(tmp_path: Path, manifest: Manifest, ids: np.ndarray) -> None:
    ids[7] = (ids[7] + 1) % VOCAB
    write_tokens(tmp_path / "a.npy", ids[:300])
    with pytest.raises(UserError, match=r"a\.npy: differs"):
        open_corpus(manifest, [tmp_path])


def test_a_file_named_with_the_wrong_dtype_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    wrong = manifest_of(replace(manifest.files[1], dtype="uint16", tokens=400))
    with pytest.raises(UserError, match=r"b\.npy.*uint32"):
        open_corpus(wrong, [tmp_path])


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, manifest: Manifest, ids: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"[ab]\.npy: has id \d+"):
        open_corpus(replace(manifest, vocab_size=int(ids.max())), [tmp_path])


def test_a_verified_file_is_read_again_only_when_it_changed(tmp_path: Path, manifest: Manifest, ids: np.ndarray) -> None:
    verified = tmp_path / "run" / "verified.json"
    find_local(manifest, [tmp_path], verified)
    status = (tmp_path / "a.npy").stat()
    write_tokens(tmp_path / "a.npy", ids[:300][::-1])
    os.utime(tmp_path / "a.npy", ns=(status.st_atime_ns, status.st_mtime_ns))
    find_local(manifest, [tmp_path], verified)
    os.utime(tmp_path / "a.npy", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"a\.npy: differs"):
        find_local(manifest, [tmp_path], verified)


def test_a_damaged_memory_of_verified_files_is_replaced_and_said(
    tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    verified = tmp_path / "verified.json"
    for content in (b"{", b"[]", b"\xff"):
        verified.write_bytes(content)
        for _ in range(2):
            find_local(manifest, [tmp_path], verified)
    assert caplog.messages == 3 * [f"{verified}: damaged; verifying the text on this machine again"]


def test_the_campaigns_tokenizer_and_model_must_fit(manifest: Manifest) -> None:
    check_vocabulary(manifest, "ab" * 32, VOCAB, "m.json")
    with pytest.raises(UserError, match=r"^m\.json: made with another tokenizer"):
        check_vocabulary(manifest, "cd" * 32, VOCAB, "m.json")
    with pytest.raises(UserError, match=r"^m\.json: .*at least 100"):
        check_vocabulary(manifest, "ab" * 32, VOCAB - 1, "m.json")
