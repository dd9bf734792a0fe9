"""A campaign's files: read from disk by the bootstrap peer, fetched from the swarm by other peers, kept in each run-dir."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.campaign.record import agreed_record
from spes_p2p.campaign.start_files import MAX_START_FILES_BYTES, read_start_files
from spes_p2p.config.campaign import Campaign, CampaignConfig, load_campaign_config, parse_campaign
from spes_p2p.consensus.output import LOG
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.files import fetch_file
from spes_p2p.data.manifest import Manifest, TokenFile, check_vocabulary, read_manifest
from spes_p2p.data.mix import WeightedManifest, mixed_manifest
from spes_p2p.data.tokenizers import check_tokenizer
from spes_p2p.errors import Damaged, PeerUnreachable, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.net.contacts import find_contacts
from spes_p2p.net.interfaces import Registry
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.storage.files import write_whole
from spes_p2p.storage.store import frame_record, read_frame

logger = logging.getLogger(__name__)

CAMPAIGN_FILE, TOKENIZER_FILE = "campaign.json", "tokenizer.json"
MANIFEST_FILE, VALIDATION_FILE = "manifest.json", "validation_manifest.json"
START_FILE = "start_files.json"
GENESIS_FILE = "genesis"
MAX_MANIFEST_BYTES, MAX_TOKENIZER_BYTES = 2**25, 2**26
"""Bounds a campaign's files before they are parsed: 80,000 token files; twice the largest tokenizer in use."""
WITHOUT_GENESIS = "copy it from another peer's run-dir, or join with another --run-dir"
RESTORE = "join again with this run-dir to restore it, or copy it from another peer's"


@dataclass(frozen=True)
class CampaignFiles:
    """The files that every peer needs, except token files and the base."""

    campaign: Campaign
    manifest: bytes
    validation_manifest: bytes | None
    tokenizer: bytes
    folders: tuple[Path, ...]
    """Local folders to search for token files."""
    home: Path = Path()
    """Folder of the campaign file, where this process read one."""
    start_files: bytes | None = None
    """`start.files` in one, if there are any."""

    @property
    def blobs(self) -> dict[str, bytes]:
        """The files by SHA-256, as they are served to other peers."""
        files = (self.manifest, self.validation_manifest, self.tokenizer, self.start_files)
        return {sha256(content): content for content in files if content is not None}

    @property
    def num_samples(self) -> int:
        """Samples in one epoch of the training text."""
        length = self.campaign.config.training.sequence_length
        return sum(file.tokens // length for file in self.training_manifest.files)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Manifests of the training text and, if any, the held-out text."""
        held_out = self.held_out_manifest
        return (self.training_manifest,) if held_out is None else (self.training_manifest, held_out)

    @property
    def token_files(self) -> tuple[TokenFile, ...]:
        """Token files of all manifests."""
        return tuple(file for manifest in self.manifests for file in manifest.files)

    @property
    def training_manifest(self) -> Manifest:
        """Manifest of the training text."""
        return Manifest.from_json(self.manifest, MANIFEST_FILE)

    @property
    def held_out_manifest(self) -> Manifest | None:
        """Manifest of the held-out text, if any."""
        return None if self.validation_manifest is None else Manifest.from_json(self.validation_manifest, VALIDATION_FILE)


def read_campaign(config_path: Path) -> CampaignFiles:
    """Read a campaign file and the files it names. Raises UserError if they do not fit together."""
    config = load_campaign_config(config_path)
    folder = config_path.resolve().parent
    tokenizer_path = folder / config.data.tokenizer
    identity = check_tokenizer(tokenizer_path, config.data.eos_token, config.model.vocab_size)
    validation_path = folder / config.data.validation_manifest if config.data.validation_manifest else None
    written = [source.manifest for source in config.data.train] or [config.data.manifest or ""]
    paths = [folder / name for name in written]
    length = config.training.sequence_length
    for path in filter(None, (*paths, validation_path)):
        text = read_manifest(path)
        check_vocabulary(text, identity.sha256, config.model.vocab_size, str(path))
        if config.training.intra_document_masking and text.eos_token_id != identity.eos_token_id:
            raise UserError(
                f"{path}: its documents end with id {text.eos_token_id}, but data.eos_token = {config.data.eos_token!r} is id "
                f"{identity.eos_token_id}, which training.intra_document_masking goes by; tokenize with that --eos-token"
            )
        if not any(file.tokens >= length for file in text.files):
            raise UserError(
                f"{path}: no token file holds a whole sample of {length} tokens; add text or reduce training.sequence_length"
            )
    manifest = _mixed(config, paths) if config.data.train else paths[0].read_bytes()
    validation = validation_path.read_bytes() if validation_path else None
    start_files = read_start_files(folder, config.start.files) if config.start is not None else None
    campaign = Campaign(
        config=config,
        manifest_sha256=sha256(manifest),
        validation_manifest_sha256=sha256(validation) if validation is not None else None,
        tokenizer_sha256=identity.sha256,
        **({} if start_files is None else {"start_files_sha256": sha256(start_files)}),
    )
    folders = tuple(dict.fromkeys(path.parent for path in (*paths, validation_path) if path))
    return CampaignFiles(campaign, manifest, validation, tokenizer_path.read_bytes(), folders, folder, start_files)


def _mixed(config: CampaignConfig, paths: Sequence[Path]) -> bytes:
    """Return the manifest that a campaign with several sources publishes: all their files, and the weights."""
    sources = [
        WeightedManifest(source.name, source.weight, read_manifest(path), str(path))
        for source, path in zip(config.data.train, paths, strict=True)
    ]
    return mixed_manifest(sources).to_json().encode()


async def fetch_campaign(
    endpoint: RpcEndpoint, peers: Sequence[str], registry: Registry | None = None, folders: Sequence[Path] = (),
    patience_s: float = 0.0,
) -> tuple[CampaignFiles, Commit]:
    """Fetch the files and the genesis commit of the campaign that these peers serve, verified by hash.

    The peers in the registry serve files too. `folders`: local folders to search for token files.
    `patience_s`: how long to wait for a peer that still starts. Raises UserError.
    """
    record, donors = await agreed_record(endpoint, peers, patience_s)
    campaign = parse_campaign(record.campaign_json, f"peer {donors[0]}")
    if record.genesis.campaign != campaign.hash:
        raise UserError(f"peer {donors[0]}: serves the genesis commit of another campaign; ask the campaign's owner")
    if registry is not None:
        with contextlib.suppress(PeerUnreachable):
            donors += sorted(await find_contacts(registry, endpoint.transport, campaign.hash))
    donors = [peer for peer in dict.fromkeys(donors) if peer != endpoint.peer_id]
    fetcher, sizes = Fetcher(endpoint), dict(record.blobs)
    wanted = (
        (campaign.manifest_sha256, MAX_MANIFEST_BYTES), (campaign.validation_manifest_sha256, MAX_MANIFEST_BYTES),
        (campaign.tokenizer_sha256, MAX_TOKENIZER_BYTES), (campaign.start_files_sha256, MAX_START_FILES_BYTES),
    )
    files = [None if sha is None else await fetch_file(fetcher, sha, sizes.get(sha, 0), most, donors) for sha, most in wanted]
    manifest, validation, tokenizer, start_files = files
    assert manifest is not None
    assert tokenizer is not None
    made = CampaignFiles(campaign, manifest, validation, tokenizer, tuple(folders), start_files=start_files)
    return made, record.genesis


def check_run_dir(files: CampaignFiles, genesis: Commit, run_dir: Path) -> bool:
    """Return whether the run-dir holds this campaign, whole: `keep_campaign` repairs damaged files.

    Raises UserError if it is another campaign, or so damaged that nobody can tell.
    """
    try:
        known = read_run_dir(run_dir)
    except UserError:
        if genesis.campaign != files.campaign.hash or not _begins_with(genesis, run_dir):
            read_genesis(run_dir)  # raises what is wrong with it alone
            if _content(run_dir / CAMPAIGN_FILE) == files.campaign.canonical_json():
                raise Damaged(f"{run_dir / GENESIS_FILE}: of another campaign; {WITHOUT_GENESIS}") from None
            raise
        return False
    if known is None:
        return False
    ours, theirs = known[0].campaign, files.campaign
    if ours.hash != theirs.hash:
        raise UserError(
            f"{run_dir}: belongs to campaign {ours.config.name} ({ours.hash[:12]}), not to {theirs.config.name} "
            f"({theirs.hash[:12]}); give another --run-dir"
        )
    if known[1].id != genesis.id:
        raise UserError(f"{run_dir}: belongs to an earlier start of campaign {ours.config.name}; give another --run-dir")
    return True


def keep_campaign(files: CampaignFiles, genesis: Commit, run_dir: Path) -> None:
    """Write the campaign to the run-dir. Raises UserError if that belongs to another campaign."""
    if check_run_dir(files, genesis, run_dir):
        return
    wanted = {
        TOKENIZER_FILE: files.tokenizer,
        MANIFEST_FILE: files.manifest,
        VALIDATION_FILE: files.validation_manifest,
        START_FILE: files.start_files,
        GENESIS_FILE: frame_record(pack(genesis)),
        CAMPAIGN_FILE: files.campaign.canonical_json(),
    }
    missing = {name: content for name, content in wanted.items() if content is not None and content != _content(run_dir / name)}
    if (run_dir / CAMPAIGN_FILE).exists():
        logger.warning("%s: restored %s, damaged or missing", run_dir, " and ".join(missing))
    for name, content in missing.items():
        write_whole(run_dir / name, content)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def read_run_dir(run_dir: Path) -> tuple[CampaignFiles, Commit] | None:
    """Return what `keep_campaign` wrote, None if the run-dir holds no campaign. Raises Damaged."""
    path, genesis = run_dir / CAMPAIGN_FILE, read_genesis(run_dir)
    if genesis is None:
        return None
    published = path.read_bytes()
    if sha256(published) != genesis.campaign:
        raise Damaged(f"{path}: damaged, or of another campaign than {GENESIS_FILE}; {RESTORE}")
    try:
        campaign = parse_campaign(published, str(path))
        validation = (run_dir / VALIDATION_FILE).read_bytes() if campaign.validation_manifest_sha256 else None
        start_files = (run_dir / START_FILE).read_bytes() if campaign.start_files_sha256 else None
        manifest, tokenizer = (run_dir / MANIFEST_FILE).read_bytes(), (run_dir / TOKENIZER_FILE).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename}: missing; {RESTORE}") from None
    for name, content, digest in (
        (TOKENIZER_FILE, tokenizer, campaign.tokenizer_sha256),
        (MANIFEST_FILE, manifest, campaign.manifest_sha256),
        (VALIDATION_FILE, validation, campaign.validation_manifest_sha256),
        (START_FILE, start_files, campaign.start_files_sha256),
    ):
        if content is not None and sha256(content) != digest:
            raise Damaged(f"{run_dir / name}: damaged; {RESTORE}")
    return CampaignFiles(campaign, manifest, validation, tokenizer, (), start_files=start_files), genesis


def _begins_with(genesis: Commit, run_dir: Path) -> bool:
    """Return whether a run-dir has this genesis commit, or a first commit that follows from it."""
    with contextlib.suppress(Damaged):
        if read_genesis(run_dir) == genesis:
            return True
    try:
        first = unpack(CertifiedCommit, read_frame((run_dir / LOG).read_bytes())[0])
    except (FileNotFoundError, ValueError):
        return False
    return first.commit.parent == genesis.id


def read_genesis(run_dir: Path) -> Commit | None:
    """Return the genesis commit in a run-dir, None if it holds no campaign. Raises Damaged."""
    if not (run_dir / CAMPAIGN_FILE).exists():
        return None
    try:
        return unpack(Commit, read_frame((run_dir / GENESIS_FILE).read_bytes())[0])
    except FileNotFoundError:
        raise Damaged(f"{run_dir / GENESIS_FILE}: missing; {WITHOUT_GENESIS}") from None
    except ValueError as error:
        raise Damaged(f"{run_dir / GENESIS_FILE}: damaged ({error}); {WITHOUT_GENESIS}") from None


def sha256(content: bytes) -> str:
    """Return the hex digest."""
    return hashlib.sha256(content).hexdigest()
