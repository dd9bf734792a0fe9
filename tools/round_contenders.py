"""The processes of ./tools/bench round: one member of a round, which starts it on a line `go` on stdin.

Each prints JSON lines: what the others need to reach it, then `{"ready": true}`, and after each `go` the costs of its round.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import logging
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

EXPERTS, MEMBERS = 8, 4
MOST_BYTES = 1936 * 2**20
"""Maximum body of a message of the parameter server, as in SPES: just below protobuf's limit."""
GRPC_OPTIONS = (("grpc.max_send_message_length", MOST_BYTES + 2**20), ("grpc.max_receive_message_length", MOST_BYTES + 2**20))
POLL_S = 0.05
TIMEOUT_S = 300.0
MEMORY_EVERY_S = 0.02

Report = dict[str, Any]
Spec = dict[str, Any]


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    MEMBER_KINDS[spec["kind"]](spec)


def say(**report: Any) -> None:
    print(json.dumps(report), flush=True)


def wait_for_go() -> bool:
    """Wait for the next line; return False if the benchmark is over."""
    return sys.stdin.readline().strip() == "go"


class Meter:
    """CPU seconds, peak memory and daemon traffic of this process and its children, from `start` to `read`.

    Memory is that of the largest process, without mapped files (page cache that the kernel can reclaim).
    """

    def __init__(self, maps_files: bool = False):
        """`maps_files`: shared memory is mapped files in /dev/shm, so it does not count."""
        self._kinds = ("RssAnon",) if maps_files else ("RssAnon", "RssShmem")
        self._peak, self._before = 0, 0
        self._measuring = threading.Event()
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def start(self) -> None:
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._peak = self._before = self._memory_now()
        self._measuring.set()
        self._cpu, self._written = self._cpu_now(), self._written_by_daemons()

    def read(self) -> Report:
        """Return the costs. `daemon_bytes`: written by the libp2p daemons, to the network and to their own process."""
        end = time.monotonic()
        self._measuring.clear()
        return {"end": end, "cpu_seconds": self._cpu_now() - self._cpu, "peak_bytes": self._peak,
                "extra_bytes": self._peak - self._before, "daemon_bytes": self._written_by_daemons() - self._written}

    def _watch_memory(self) -> None:
        while self._measuring.wait():
            self._peak = max(self._peak, self._memory_now())
            time.sleep(MEMORY_EVERY_S)

    def _memory_now(self) -> int:
        return max(_resident_bytes(process, self._kinds) for process in self._processes)

    def _cpu_now(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def _written_by_daemons(self) -> int:
        return sum(process.io_counters()[4 + 1] for process in self._processes if "p2pd" in process.name())


def _resident_bytes(process: psutil.Process, kinds: tuple[str, ...]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(kinds))


def tensor_sizes(elements: int) -> tuple[int, int]:
    """Return the sizes of the shared weights, a fifth of the state, and of one expert."""
    shared = elements // 5
    return shared, (elements - shared) // EXPERTS


def digest_of(arrays: list[np.ndarray]) -> str:
    hashing = hashlib.sha256()
    for array in arrays:
        hashing.update(array.data.cast("B"))
    return hashing.hexdigest()


def our_member(spec: Spec) -> None:
    """Run one of our peers, whose trainer waits for `go`. The bootstrap peer leaves after round 0."""
    import uvloop

    from spes_p2p.storage.threads import keep_freed_memory

    keep_freed_memory()
    uvloop.install()
    asyncio.run(_our_life(spec))


async def _our_life(spec: Spec) -> None:
    from spes_p2p.observe.events import Event, RoundCommitted
    from spes_p2p.testing.synthetic import SyntheticTrainer
    from spes_p2p.training.interface import Phase, PhaseReport

    meter, layout = Meter(maps_files=True), our_layout(spec["elements"])

    class GatedTrainer(SyntheticTrainer):
        """Starts and ends its phase on `go`, so that no member trains while another is still in the round."""

        def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
            say(trains=True)
            wait_for_go()
            report = super().train(phase, should_stop, on_step)
            say(ready=True)
            wait_for_go()
            meter.start()
            return report

    def report(peer: Any, event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.round > 0:
            say(**meter.read(), digest=event.base_digest, sent_bytes=event.sent_bytes, received_bytes=event.received_bytes,
                phases=event.seconds, dropped=event.dropped_parts)
        elif isinstance(event, RoundCommitted) and spec["kind"] == "bootstrap":
            peer.leave()

    spec = {**spec, "address": "127.0.0.1", "owned": EXPERTS // MEMBERS, "latency_s": 0.0}
    await live(spec, lambda base, owned: GatedTrainer(layout, base, owned, 1000, 1.0, spec["member"]), report)


async def live(
    spec: Spec, make_trainer: Callable[[np.ndarray, tuple[int, ...]], Any], report: Callable[[Any, Any], None]
) -> None:
    """Run a trainer, or the bootstrap peer, until it leaves. `report(peer, event)` is called for each event."""
    from spes_p2p.campaign.genesis import make_genesis, save_base_0
    from spes_p2p.consensus.output import Identity
    from spes_p2p.messages.codec import pack, unpack
    from spes_p2p.messages.consensus import Commit
    from spes_p2p.net.interface_bytes import sent_by_interfaces
    from spes_p2p.net.interfaces import World
    from spes_p2p.net.libp2p import start_libp2p
    from spes_p2p.net.limits import Line
    from spes_p2p.peer.announcing import NOTHING_TO_TRAIN, Capacity
    from spes_p2p.peer.durable import voter_incarnation
    from spes_p2p.peer.life import Peer
    from spes_p2p.peer.node import Node
    from spes_p2p.rounds.outer import first_base
    from spes_p2p.rounds.plan import Rules
    from spes_p2p.storage.store import DirectoryStore
    from spes_p2p.testing.latency import delayed

    folder, campaign, layout = Path(spec["folder"]), our_campaign(spec), our_layout(spec["elements"])
    net = await start_libp2p(folder / "identity.key", [f"/ip4/{spec['address']}/tcp/0"], (), spec.get("addresses", ()))
    store, weights = DirectoryStore(folder), np.random.default_rng(0).standard_normal(layout.size, np.float32)
    base0 = first_base(weights, layout, campaign.config.outer)
    genesis = unpack(Commit, bytes.fromhex(spec["genesis"])) if "genesis" in spec else (
        make_genesis(campaign, net.identity.peer_id, base0, voter_incarnation(store, random.Random())))
    save_base_0(store, genesis, base0)
    del weights, base0
    transport = delayed(net.transport, spec["latency_s"])
    identity = net.identity if spec.get("signs", True) else cast(Identity, trustful(net.identity))
    world = World(
        transport, net.registry, identity, store, time.time, random.Random(), asyncio.to_thread, Line(sent=sent_by_interfaces)
    )
    helps = spec["kind"] == "bootstrap"

    def observe(event: Any) -> None:
        report(peer, event)

    rules = Rules(campaign.config, campaign.hash, 10**6)
    node = Node(world, campaign, genesis, rules, "helper" if helps else "trainer", {}, observe)
    peer = Peer(
        node, layout, None if helps else make_trainer, NOTHING_TO_TRAIN if helps else Capacity(spec["owned"]), observe,
        lambda: b"", str(folder), base_in_memory=spec.get("base") == "ram",
    )
    if helps:
        say(address=net.transport.addresses[0], genesis=pack(genesis).hex())
    try:
        await peer.run()
    finally:
        await net.close()


def trustful(identity: Any) -> Any:
    """Return the identity of a peer that signs nothing, believes everything, and checks no reducer."""
    from spes_p2p.peer import checking
    from spes_p2p.testing.wrapped import Wrapped

    class Trustful(Wrapped):
        def sign(self, message: bytes) -> bytes:
            return b""

        def verify(self, peer_id: str, message: bytes, signature: bytes) -> bool:
            return True

    vars(checking)["drawn"] = lambda *_: []
    return Trustful(identity)


def our_layout(elements: int) -> Any:
    from spes_p2p.model.layout import Layout, TensorSpec

    shared, expert = tensor_sizes(elements)
    return Layout([TensorSpec("shared", (shared,), "shared"), TensorSpec("gate", (EXPERTS, 64), "router", 0)]
                  + [TensorSpec(f"experts.{e}", (expert,), "expert", 0, e) for e in range(EXPERTS)])


def our_campaign(spec: Spec) -> Any:
    from spes_p2p.config.campaign import Campaign, parse_campaign_config

    raw = {
        "name": "bench",
        "model": {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "max_position_embeddings": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2,
        },
        "training": {"sequence_length": 64, "batch_size": 1, "total_steps": 1000, "sync_steps": 1, "learning_rate": 1e-3},
        "experts": {"experts_per_peer": EXPERTS // MEMBERS},
        "sync": {"codec": spec["codec"], "min_peers": MEMBERS, "join_grace_s": 0.0, "silence_s": 20.0, **spec["sync"]},
        "evaluation": {"every_rounds": 0},
        "data": {"manifest": "-", "tokenizer": "-"},
    }
    return Campaign(config=parse_campaign_config(raw, "bench"), manifest_sha256="0" * 64,
                    validation_manifest_sha256=None, tokenizer_sha256="1" * 64)


def dense_member(spec: Spec) -> None:
    """Run a peer of hivemind's DecentralizedAverager; finding the group is not measured."""
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    dht = DHT(initial_peers=spec.get("addresses", []), start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False)
    say(address=str(dht.get_visible_maddrs()[0]))
    shared, expert = tensor_sizes(spec["elements"])
    torch.manual_seed(spec["member"])
    tensors = [torch.randn(size) for size in (shared, *[expert] * EXPERTS)]
    averager = DecentralizedAverager(tensors, dht, start=True, prefix="bench", target_group_size=MEMBERS,
                                     min_group_size=MEMBERS, min_matchmaking_time=2.0, bandwidth=1e9)
    meter = Meter()
    while True:
        control = averager.step(wait=False, require_trigger=True, timeout=TIMEOUT_S)
        while control.stage != AveragingStage.AWAITING_TRIGGER:
            time.sleep(POLL_S)
        say(ready=True)
        if not wait_for_go():
            break
        meter.start()
        control.allow_allreduce()
        control.result(TIMEOUT_S)
        cost = meter.read()
        with averager.get_tensors() as averaged:
            digest = digest_of([tensor.numpy() for tensor in averaged])
        say(**cost, digest=digest, sent_bytes=cost["daemon_bytes"] // 2)
    control.cancel()
    averager.shutdown()
    dht.shutdown()


@functools.cache
def messages() -> tuple[type[Any], type[Any]]:
    """Return the protobuf classes of request and answer, whose bodies are pieces of at most MOST_BYTES."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    fields = descriptor_pb2.FieldDescriptorProto
    kinds = dict.fromkeys(("peer", "round", "piece", "pieces"), fields.TYPE_INT32)
    kinds |= {"ready": fields.TYPE_BOOL, "body": fields.TYPE_BYTES}
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    for name, names in (("Request", ("peer", "round", "piece", "pieces", "body")), ("Answer", ("ready", "pieces", "body"))):
        message = file.message_type.add(name=name)
        for number, field in enumerate(names, 1):
            message.field.add(name=field, number=number, type=kinds[field], label=fields.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, answer = (pool.FindMessageTypeByName(f"bench.{name}") for name in ("Request", "Answer"))
    return message_factory.GetMessageClass(request), message_factory.GetMessageClass(answer)


class ParameterServer:
    """Receives what each client trained, averages it, and sends the whole state to all clients.

    It keeps the last answer until the next one is ready.
    """

    def __init__(self, state: dict[str, Any]):
        self.state = state
        self.uploads: list[bytes] = []
        self.answer, self.round = b"", 0
        self.downloads: queue.Queue[None] = queue.Queue()
        self._lock = threading.Lock()

    def upload(self, requests: Iterator[Any], context: Any) -> Any:
        whole = b"".join([request.body for request in requests])
        with self._lock:
            self.uploads.append(whole)
            del whole
            if len(self.uploads) == MEMBERS:
                self._average()
        return messages()[1](ready=True)

    def download(self, request: Any, context: Any) -> Any:
        """Return the requested piece, or "not ready"."""
        if request.round > self.round:
            return messages()[1](ready=False)
        start = request.piece * MOST_BYTES
        piece, pieces = self.answer[start : start + MOST_BYTES], -(-len(self.answer) // MOST_BYTES)
        if request.piece == pieces - 1:
            self.downloads.put(None)
        return messages()[1](ready=True, pieces=pieces, body=piece)

    def _average(self) -> None:
        import torch

        received = [torch.load(io.BytesIO(upload)) for upload in self.uploads]
        for name in self.state:
            trained = [upload[name] for upload in received if name in upload]
            self.state[name] = torch.stack(trained).mean(0) if len(trained) > 1 else trained[0]
        self.answer = serialised(self.state)
        self.round += 1
        self.uploads = []


def server(spec: Spec) -> None:
    import grpc
    import torch

    torch.set_num_threads(1)
    serving = ParameterServer(random_state(spec["elements"], 0))
    request, answer = messages()
    how = {"request_deserializer": request.FromString, "response_serializer": answer.SerializeToString}
    handlers = {
        "upload": grpc.stream_unary_rpc_method_handler(serving.upload, **how),
        "download": grpc.unary_unary_rpc_method_handler(serving.download, **how),
    }
    grpc_server = grpc.server(ThreadPoolExecutor(2 * MEMBERS), options=GRPC_OPTIONS)
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    meter = Meter()
    say(address=f"127.0.0.1:{port}")
    say(ready=True)
    while wait_for_go():
        meter.start()
        for _ in range(MEMBERS):
            serving.downloads.get(timeout=TIMEOUT_S)
        say(**meter.read(), digest="", sent_bytes=MEMBERS * len(serving.answer))
        say(ready=True)
    grpc_server.stop(0)


def client(spec: Spec) -> None:
    import grpc
    import torch

    torch.set_num_threads(1)
    channel = grpc.insecure_channel(spec["addresses"][0], options=GRPC_OPTIONS)
    request, answer = messages()
    how = {"request_serializer": request.SerializeToString, "response_deserializer": answer.FromString}
    upload, download = channel.stream_unary("/bench/upload", **how), channel.unary_unary("/bench/download", **how)
    state = random_state(spec["elements"], spec["member"])
    each = EXPERTS // MEMBERS
    mine = ["shared", *(f"experts.{e}" for e in range(each * spec["member"], each * (spec["member"] + 1)))]
    meter, round_number = Meter(), 0
    while True:
        say(ready=True)
        if not wait_for_go():
            return
        meter.start()
        round_number += 1
        body = serialised({name: state[name] for name in mine})
        upload(in_messages(body, spec["member"]))
        for name, values in torch.load(io.BytesIO(downloaded(download, round_number))).items():
            state[name].copy_(values)
        say(**meter.read(), digest=digest_of([tensor.numpy() for tensor in state.values()]), sent_bytes=len(body))


def in_messages(body: bytes, member: int) -> Iterator[Any]:
    pieces = -(-len(body) // MOST_BYTES)
    for i in range(pieces):
        yield messages()[0](peer=member, piece=i, pieces=pieces, body=body[i * MOST_BYTES : (i + 1) * MOST_BYTES])


def downloaded(download: Callable[[Any], Any], round_number: int) -> bytes:
    """Download the state of this round piece by piece, as soon as it is ready."""
    pieces: list[bytes] = []
    while True:
        answer = download(messages()[0](round=round_number, piece=len(pieces)))
        if not answer.ready:
            time.sleep(POLL_S)
            continue
        pieces.append(answer.body)
        if len(pieces) == answer.pieces:
            return b"".join(pieces)


def random_state(elements: int, seed: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    shared, expert = tensor_sizes(elements)
    return {"shared": torch.randn(shared), **{f"experts.{e}": torch.randn(expert) for e in range(EXPERTS)}}


def serialised(state: dict[str, Any]) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


MEMBER_KINDS: dict[str, Callable[[Spec], None]] = {
    "bootstrap": our_member, "ours": our_member, "dense": dense_member, "server": server, "client": client,
}

if __name__ == "__main__":
    main()
