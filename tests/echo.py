"""A handler of streams for tests of networks."""

from spes_p2p.net.interfaces import Channel


async def echo(channel: Channel) -> None:
    while (message := await channel.receive()) is not None:
        await channel.send(bytes(message.body), kind=message.kind)
    await channel.finish()
