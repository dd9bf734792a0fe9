"""Export a committed base, from a run-dir or a running swarm, as a checkpoint with a model card."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spes_p2p.campaign.files import TOKENIZER_FILE, CampaignFiles
from spes_p2p.campaign.start_files import exported_files
from spes_p2p.client.chronicle import Chronicle, owners_first
from spes_p2p.client.connection import SwarmConnection, connect
from spes_p2p.client.model_card import Origin, card_files, origin_of
from spes_p2p.client.proven import learn_commits
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.control import is_rollback, runs
from spes_p2p.consensus.reform import is_reform
from spes_p2p.content.bases import collect_offers, download
from spes_p2p.content.fetcher import VISITORS_PATIENCE_S, Fetcher
from spes_p2p.errors import PeerUnreachable, UserError, first_line
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.events import Event
from spes_p2p.observe.history import read_rounds
from spes_p2p.observe.rounds import Rounds
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.schedule import is_over
from spes_p2p.session.run_dir import load_run_dir_base
from spes_p2p.storage.scratch import file_scratch

if TYPE_CHECKING:
    from spes_p2p.model.export import ExportDtype

TRIES, RETRY_S = 10, 1.0
"""Retries of a base download. Donors keep two bases, so a base can disappear during the request."""


@dataclass(frozen=True)
class Exportable:
    """A base with everything that its checkpoint needs."""

    files: CampaignFiles
    values: np.ndarray
    """float32: the weights, then the outer momentum."""
    origin: Origin

    def write(self, output: Path, dtype: ExportDtype = "fp32", start_files: bool = False) -> None:
        """Write the checkpoint, with `start_files` also the campaign's. Raises UserError if `output` exists.

        Without them, nothing in it but model and tokenizer follows the campaign's owner: peers load it while they train.
        """
        from spes_p2p.model.build import layout_of
        from spes_p2p.model.export import export_checkpoint

        data = self.files.campaign.config.data
        with tempfile.TemporaryDirectory(prefix="spes-export-") as folder:
            tokenizer = Path(folder) / TOKENIZER_FILE
            tokenizer.write_bytes(self.files.tokenizer)
            model = self.files.campaign.config.model
            weights = self.values[: layout_of(model).size]
            beside = card_files(self.origin, dtype)
            if start_files and self.files.start_files is not None:
                kept = exported_files(self.files.start_files, data.eos_token, data.pad_token)
                beside |= {TOKENIZER_FILE: self.files.tokenizer.decode(), **kept}
            export_checkpoint(model, weights, tokenizer, data.eos_token, data.pad_token, output, beside, dtype)


def from_run_dir(run_dir: Path, round_number: int | None = None) -> Exportable:
    """Return a peer's last base, or the one it archived of this round. Raises UserError if it holds random weights."""
    files, base = load_run_dir_base(run_dir, round_number)
    if base.round < 0 and files.campaign.config.start is None:
        raise UserError(f"{run_dir}: holds only the untrained base 0; wait for a round, or give another --run-dir")
    seen = list[Event | RoundRecord]()
    records = read_rounds(run_dir, on_entry=seen.append).records
    return Exportable(files, base.values, origin_of(files.campaign, base.round, base.digest, records, journal=seen))


async def from_swarm(
    addresses: Sequence[str], folder: Path, on_progress: Callable[[int, int], None], after: int = -1
) -> Exportable:
    """Download the newest base of a running swarm, verifying every piece. Raises UserError if there is none after this round.

    It is in a temporary file of the folder, not in memory.
    """
    async with connect(addresses) as swarm:
        files = await swarm.files()
        chronicle = Chronicle(swarm, files.campaign.config)
        for _ in range(TRIES):
            with contextlib.suppress(PeerUnreachable):
                config = files.campaign.config
                round_number, digest, values = await _newest_base(swarm, config, chronicle, folder, on_progress, after)
                records = await _history(swarm, chronicle, round_number)
                origin = origin_of(files.campaign, round_number, digest, records, await swarm.statuses())
                return Exportable(files, values, origin)
            await asyncio.sleep(RETRY_S)
    raise UserError(f"{addresses[0]}: no peer serves a trained base; try again after a committed round")


async def _newest_base(
    swarm: SwarmConnection, config: CampaignConfig, chronicle: Chronicle, folder: Path,
    on_progress: Callable[[int, int], None], after: int,
) -> tuple[int, str, np.ndarray]:
    """Return (round, digest, values) of the newest base whose digest is proven. Raises PeerUnreachable if there is none.

    The certificate of a round names the digest of the base before it. The last base of a campaign has no round after it, nor
    has that of a pause, or one with which the owner opened a term while no trainer is there: these are taken if the owner's
    helpers, whose ids the genesis commit names, all offer the same one.
    """
    contacts = await swarm.contacts()
    helpers = [peer for peer in swarm.genesis.helpers if peer in contacts]
    peers = [*helpers, *sorted(contacts.keys() - set(helpers), key=lambda peer: -contacts[peer].round)]
    for peer in peers:
        await learn_commits(swarm.endpoint, chronicle.log, peer)
    log = chronicle.log
    if log.last.step == 0 and all(contact.round < 1 for contact in contacts.values()):
        raise UserError(f"{swarm.addresses[0]}: no peer serves a trained base; try again after a committed round")
    from spes_p2p.model.build import layout_of  # with torch: takes seconds

    last, size = log.last, base_size(layout_of(config.model), config.outer)
    rests = is_over(last, config, last.control) or not runs(last.control) or is_reform(last)
    digest = await _digest_of_last(swarm, helpers, last, size) if rests else None
    proven = [(last, digest)] if digest is not None else []
    if is_rollback(last):
        proven.append((last, last.base_digest))
    elif last.round > 0 and last.plan:
        proven.append((log.commit_at(last.round - 1), last.base_digest))
    for commit, digest in proven:
        if commit.round <= after:
            raise UserError(f"{swarm.addresses[0]}: no base after round {after} yet")
        offers = await collect_offers(swarm.endpoint, peers, commit.id, size, digest=digest)
        if offers and commit.step > 0:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = partial(file_scratch, folder)
            fetcher = Fetcher(swarm.endpoint, VISITORS_PATIENCE_S)
            values, _ = await download(fetcher, offers, None, on_progress, scratch=scratch)
            values.flags.writeable = False
            return commit.round, digest, values
    raise PeerUnreachable("no peer offers a trained base that a certificate names")


async def _digest_of_last(swarm: SwarmConnection, helpers: Sequence[str], last: Commit, size: int) -> str | None:
    """Return the digest of a campaign's last base, in which the owner's helpers agree; None if they do not, or none answers."""
    digests = {offer.info.digest for peer in helpers for offer in await collect_offers(swarm.endpoint, [peer], last.id, size)}
    return digests.pop() if len(digests) == 1 else None


async def _history(swarm: SwarmConnection, chronicle: Chronicle, round_number: int) -> tuple[RoundRecord, ...]:
    """Return the peers' records of the rounds up to this one: all that the log has, and earlier ones that came with them."""
    rounds, wanted = Rounds(""), [number for number in chronicle.rounds if number <= round_number]
    for peer in owners_first(swarm, await swarm.contacts()):
        async for page in chronicle.pages(swarm, peer):
            for record in page.records:
                rounds.add(record)
        if not rounds.missing(wanted):
            break
    return rounds.records


def check_repository(repo: str) -> None:
    """Raise UserError unless this can be a model repository of the Hub. Called before long work."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"--push-to '{repo}': not a repository name; give OWNER/NAME") from None


def push_to_hub(folder: Path, repo: str, private: bool) -> str:
    """Upload a checkpoint folder to a model repository of the Hub, created if missing; return its URL.

    Raises UserError if the Hub is unreachable or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Checkpoint {folder.name}")
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"--push-to '{repo}': {reason}; the checkpoint is in {folder}; log in with `hf auth login`") from None
    return f"{api.endpoint}/{repo}"
