"""A reducer's sum: the mean that it makes of the contributors' updates of a part, and whether a result is what its inputs give.

The reducer names its inputs in the manifest, which the commit contains, and has each contributor's signature under its update,
so whoever gets the updates can make the mean again. The reducer adds at most half a quantization step of what earlier encodings
dropped (its residual), and encodes: the result is close to the mean, whatever that residual was, and farther away only if the
reducer did something else. A check therefore needs no residual, and does not depend on the last bit of anybody's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Inputs, Pushed, Update
from spes_p2p.rounds.cells import NO_CELL
from spes_p2p.rounds.digest import DIGEST_BYTES, content_digest
from spes_p2p.rounds.influence import Contribution, clipped_mean
from spes_p2p.rounds.parts import Part, from_mask, mask_bytes, weight
from spes_p2p.rounds.plan import MAX_TOKENS
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import Results

TOLERANCE = np.float32(2.25)
"""Bounds a result's distance from its mean, in roundings of the mean: one is the carried residual, one the encoding, whose step
is at most a fourteenth larger because of it (in `ternary` it may be more: then `encode_mean` lets the residual wait)."""
SLACK, TINY = np.float32(2**-20), np.float32(2e-36)
"""The same for float32 rounding, as a share of the part's largest value; and for values that a codec takes for zero."""

NO_MEANS: Mapping[int, tuple[int, ...]] = {}
LARGEST_UPDATE = 2.0**64
"""So that the mean of updates is finite, and stays so when it is rounded."""

Decode = Callable[[], np.ndarray]


def behind_means(updates: Mapping[int, Update]) -> dict[int, tuple[int, ...]]:
    """Return the contributors that the means of cells among these updates name, by hub."""
    return {i: from_mask(each.members) for i, each in updates.items() if each.members}


def weight_of(part: Part, members: Sequence[Member], behind: Iterable[int], tokens: int, clips: bool) -> int:
    """Return the weight of an update, or of a cell's mean: its tokens, with `clips` at most those in the plan.

    `behind`: the members whose work it contains.
    """
    return min(tokens, sum(weight(members[i], part.group) for i in behind)) if clips else tokens


def may_be_summed(part: Part, sender: int, update: bytes | memoryview) -> bool:
    """Return whether a reducer takes the values of an encoded update; a cell's mean may be longer than all by a rounding."""
    return part.codec.is_valid(update, part.size, LARGEST_UPDATE * (2 if sender in part.summing else 1))


def check_contributors(update: Update, part: Part, sender: int, members: int) -> None:
    """Raise Refused unless a hub names inputs and contributors of its own cell under its mean, and others name none."""
    if sender not in part.summing:
        fits = not (update.members or update.clipped or update.inputs)
    else:
        named, clipped = set(from_mask(update.members)), set(from_mask(update.clipped))
        widths = {len(update.members), len(update.clipped)}
        fits = widths == {mask_bytes(members)} and bool(named) and clipped <= named <= set(part.in_cell(sender))
        fits &= len(update.inputs) == DIGEST_BYTES and update.tokens >= len(named)  # each has one at least
    if not fits:
        raise Refused(Code.MALFORMED, f"part {part.index} cannot have these contributors")


def make_mean(
    part: Part, members: Sequence[Member], updates: Mapping[int, tuple[int, Decode]], mean: np.ndarray, clips: bool,
    behind: Mapping[int, tuple[int, ...]] = NO_MEANS,
) -> set[int]:
    """Write the clipped, token-weighted mean of a part to `mean`; return the members whose updates were clipped.

    Where all members have cells, their means are not clipped again: the hubs have clipped, and cells differ in the number of
    contributors.

    `updates`: tokens and decoder, by member. They are summed in the order of the members, which matters to the bits. `behind`:
    see `behind_means`.
    """
    order = sorted(updates)
    found = [
        Contribution(
            weight_of(part, members, behind.get(i, (i,)), tokens, clips), decode, _standing(members, i, behind),
            tokens if members[i].is_stranger else 0, len(behind.get(i, (i,))),
        )
        for i, (tokens, decode) in sorted(updates.items())
    ]
    have_cells = part.summing and NO_CELL not in part.cell_of
    return {order[place] for place in clipped_mean(found, mean, clips and not have_cells, part.is_of_cell)}


def _standing(members: Sequence[Member], sender: int, behind: Mapping[int, tuple[int, ...]]) -> Standing:
    """Return the standing of an update or of a cell's mean: newcomers' updates count as such whoever sums them."""
    are_new = sender in behind and all(members[i].standing == "newcomer" for i in behind[sender])
    return "newcomer" if are_new else members[sender].standing


def added_residual(part: Part, mean: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Return what a reducer adds of its residual: at most what encoding the mean drops. The rest waits for a later round."""
    bound = part.codec.rounding(mean)
    limited: np.ndarray = np.minimum(residual, bound)
    np.maximum(limited, np.negative(bound, out=bound), out=limited)  # faster than np.clip
    return limited


def encode_mean(part: Part, mean: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray]:
    """Encode a mean plus some of the residual; return the bytes and their values.

    A residual that would take a value farther from the mean than `is_wrong` allows waits.
    """
    if residual is not None:
        encoded = part.codec.encode(mean + added_residual(part, mean, residual))
        decoded = part.codec.decode(encoded, part.size)
        if not is_far(part, mean, decoded):
            return encoded, decoded
    encoded = part.codec.encode(mean)
    return encoded, part.codec.decode(encoded, part.size)


def to_residual(part: Part, mean: np.ndarray, residual: np.ndarray | None, decoded: np.ndarray) -> None:
    """Turn a mean into the residual of its encoding, in place. `residual`: from earlier rounds; `decoded`: the encoded mean.

    A value that the codec left out is not in the residual, since it stays pending with the contributors.
    """
    if part.codec.leaves_out:
        np.multiply(mean, decoded != 0, out=mean)
    if residual is not None:
        np.add(mean, residual, out=mean)
    np.subtract(mean, decoded, out=mean)


def inputs_digest(updates: Mapping[int, Update]) -> bytes:
    """Return the digest of a mean's inputs, as manifests and means of cells name it. `updates`: by member."""
    return content_digest(b"".join(
        i.to_bytes(4, "little") + each.tokens.to_bytes(8, "little") + each.digest + each.members + each.inputs
        for i, each in sorted(updates.items())
    ))


def read_inputs(inputs: Inputs, part: Part, results: Results, identity: Identity) -> dict[int, Update]:
    """Return the updates of a part, by member. `results`: with the reducer's manifest.

    Raises Refused unless each contributor signed its update, and the manifest names exactly these.
    """
    named = set(results.contributors(part))
    senders = [i for i in part.inputs if named.intersection(part.in_cell(i) if i in part.summing else (i,))]
    found = _signed_updates(inputs, part, senders, results.plan, identity)
    behind = behind_means(found)
    if {j for i in found for j in behind.get(i, (i,))} != named:
        raise Refused(Code.NOT_PROVEN, "the inputs of other contributors than the manifest names")
    if inputs_digest(found) != results.inputs_of(part):
        raise Refused(Code.NOT_PROVEN, f"other inputs of part {part.index} than the manifest names")
    return found


def read_cell_inputs(inputs: Inputs, part: Part, hub: int, mean: Update, plan: Plan, identity: Identity) -> dict[int, Update]:
    """Return the updates behind a cell's mean of a part, by member. `mean`: what its hub signed.

    Raises Refused unless each contributor signed its update, and the mean names exactly these.
    """
    found = _signed_updates(inputs, part.of_cell(hub), from_mask(mean.members), plan, identity)
    if inputs_digest(found) != mean.inputs:
        raise Refused(Code.NOT_PROVEN, f"other inputs of part {part.index} than its hub names")
    return found


def _signed_updates(
    inputs: Inputs, part: Part, senders: Sequence[int], plan: Plan, identity: Identity
) -> dict[int, Update]:
    """Return the updates of a part that these members signed, by member. Raises Refused if they did not."""
    if len(inputs.updates) != len(senders):
        raise Refused(Code.NOT_PROVEN, "the inputs of other contributors than are named")
    found = dict[int, Update]()
    for i, signed in zip(senders, inputs.updates, strict=True):
        pushed = read_signed(Pushed, signed, identity)
        own = [update for update in pushed.updates if update.part == part.index]
        if signed.peer != plan.members[i].peer or pushed.plan != plan.id or len(own) != 1:
            raise Refused(Code.NOT_PROVEN, f"no update of part {part.index} that its contributor signed")
        check_contributors(own[0], part, i, len(plan.members))
        found[i] = own[0]
    return found


def is_wrong(
    part: Part,
    members: Sequence[Member],
    updates: Mapping[int, tuple[int, bytes | memoryview]],
    result: bytes | memoryview,
    clips: bool,
    behind: Mapping[int, tuple[int, ...]] = NO_MEANS,
) -> bool:
    """Return whether an encoded result is not what its inputs give.

    `updates`: tokens and encoded update, by member. `behind`: see `behind_means`.
    """
    mean = np.empty(part.size, np.float32)
    decoders = {i: (tokens, partial(part.codec.decode, body, part.size)) for i, (tokens, body) in updates.items()}
    make_mean(part, members, decoders, mean, clips, behind)
    return is_far(part, mean, part.codec.decode(result, part.size))


def tokens_behind(part: Part, members: Sequence[Member], updates: Mapping[int, Update], clips: bool) -> int:
    """Return the tokens of a cell's mean of these updates, by member."""
    return min(MAX_TOKENS, sum(weight_of(part, members, (i,), each.tokens, clips) for i, each in updates.items()))


def is_far(part: Part, mean: np.ndarray, decoded: np.ndarray) -> bool:
    """Return whether a value of a result is farther from the mean than rounding explains."""
    bound = TOLERANCE * part.codec.rounding(mean) + (SLACK * np.abs(mean).max(initial=0) + TINY)
    far = np.abs(decoded - mean) > bound
    return bool((far & (decoded != 0) if part.codec.leaves_out else far).any())
