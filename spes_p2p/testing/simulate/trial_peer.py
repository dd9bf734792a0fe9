"""The program of a peer in a simulation of processes: a real peer in a wrapped world (`trial.py`)."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from spes_p2p.campaign.files import read_campaign
from spes_p2p.client.exit_codes import exit_with
from spes_p2p.config.campaign import make_peer_config
from spes_p2p.net.interfaces import World
from spes_p2p.observe.log import setup_logging
from spes_p2p.session.run_dir import ADDRESS_FILE
from spes_p2p.storage.threads import keep_freed_memory
from spes_p2p.testing.attacks.kinds import ATTACKS, KINDS, AttackKind
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.latency import delayed
from spes_p2p.testing.simulate.trial import Trial

LIES_FILE = "lies.txt"
"""In an attacker's run-dir: a line for each lie that it told."""


def trial_program(orders: Path, latency_s: float, attack: AttackKind | None, campaign: Path) -> tuple[str, ...]:
    """Return the module for Python to run and its first arguments; the peer's command follows."""
    lies = ("--attack", attack, "--campaign", str(campaign.resolve())) if attack is not None else ()
    return (__name__, "--orders", str(orders), "--latency-s", str(latency_s), *lies)


def main() -> None:
    """Run a bootstrap peer or a trainer of a simulation."""
    import uvloop

    from spes_p2p.session.run import Extension, run_bootstrap, run_join

    arguments = _parser().parse_args()
    settings = make_peer_config(
        run_dir=arguments.run_dir, listen=[arguments.listen], experts=arguments.experts, data_dir=arguments.data_dir,
        invite=arguments.invite,
    )
    setup_logging(settings.log_level, False)
    trial = Trial(arguments.orders, arguments.run_dir.name)

    def around(world: World) -> World:
        world = replace(world, transport=delayed(world.transport, arguments.latency_s))
        return trial.around(_lying(world, arguments) if arguments.attack is not None else world)

    extension = Extension(around, (trial.observe,))

    def publish(address: str) -> None:
        (arguments.run_dir / ADDRESS_FILE).write_text(address + "\n")

    keep_freed_memory()
    uvloop.install()
    if arguments.command == "bootstrap":
        files = read_campaign(arguments.config)
        asyncio.run(run_bootstrap(files, settings, (), publish, extension))
    else:
        asyncio.run(run_join([arguments.address], settings, lambda files, address: None, extension))


def _lying(world: World, arguments: argparse.Namespace) -> World:
    """Return an attacker's world."""
    lies, config = (arguments.run_dir / LIES_FILE).open("a", buffering=1), read_campaign(arguments.campaign).campaign.config
    attack: AttackKind = arguments.attack
    return ATTACKS[attack].around(Liar(world, config, lambda lie: print(lie, file=lies)))


def _parser() -> argparse.ArgumentParser:
    peer = argparse.ArgumentParser(add_help=False)
    peer.add_argument("--run-dir", type=Path, required=True)
    peer.add_argument("--listen", required=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=Path, required=True, help="folder of the simulation's orders")
    parser.add_argument("--latency-s", type=float, default=0.0, help="delay of all that this peer receives")
    parser.add_argument("--attack", choices=KINDS, help="kind of attacker that this peer is")
    parser.add_argument("--campaign", type=Path, help="the campaign file, for an attacker")
    commands = parser.add_subparsers(dest="command", required=True)
    bootstrap = commands.add_parser("bootstrap", parents=[peer])
    bootstrap.add_argument("--config", type=Path, required=True)
    bootstrap.set_defaults(experts=None, data_dir=None, invite=None)
    join = commands.add_parser("join", parents=[peer])
    join.add_argument("address")
    join.add_argument("--experts", type=int)
    join.add_argument("--data-dir", type=Path, action="append")
    join.add_argument("--invite")
    return parser


if __name__ == "__main__":
    exit_with(main)
