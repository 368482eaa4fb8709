"""`python -m disagg_router`: one router process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from disagg_router import logs
from disagg_router.config import DEFAULT_PATH, Config, ConfigError, load
from disagg_router.discovery import KubernetesSlices, SliceSource, Source, SourceError, parse_engines
from disagg_router.logs import event
from disagg_router.replicas import replicas_in
from disagg_router.server import Router

_log = logging.getLogger("disagg_router")


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns 0 after a clean end, 2 for a configuration that cannot be used."""
    options = _options(argv)
    logs.set_up(options.log_level)
    try:
        config = _with_ports(load(options.config), options.port, options.admin_port)
        fixed = parse_engines(options.engines, config.ports.control) if options.engines else None
        return uvloop.run(_serve(config, fixed, options))
    except (ConfigError, SourceError) as exc:
        print(f"disagg_router: {exc}", file=sys.stderr)
        return 2


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="disagg_router", description="Routes turns to prefill and decode engines."
    )
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_PATH, help="router.json (default: %(default)s)"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, help="instead of the configured ports.http")
    parser.add_argument("--admin-port", type=int, help="instead of the configured ports.admin")
    parser.add_argument(
        "--engines",
        metavar="LIST|FILE",
        help="a fixed set of engines instead of Kubernetes: prefill=http://HOST:PORT,decode=http://HOST:PORT,... "
        "(append /#PORT for another control port) or a JSON file",
    )
    parser.add_argument(
        "--name",
        default=socket.gethostname(),
        help="this replica's pod, by which its EndpointSlices name it (default: the host's name)",
    )
    parser.add_argument(
        "--drain-delay",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="after SIGTERM: how long to serve on while readiness spreads (default: %(default)s)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="after that: how long answers under way may take (default: %(default)s)",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(argv)


def _with_ports(config: Config, http: int | None, admin: int | None) -> Config:
    ports = config.ports
    if http is not None:
        ports = msgspec.structs.replace(ports, http=http)
    if admin is not None:
        ports = msgspec.structs.replace(ports, admin=admin)
    return msgspec.structs.replace(config, ports=ports)


async def _serve(config: Config, fixed: Source | None, options: argparse.Namespace) -> int:
    stop: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop, number)
    router = Router(config, options.host, name=options.name)
    slices: KubernetesSlices | None = None
    source = fixed
    if source is None:
        slices = await KubernetesSlices.connect(config.namespace, config.name)
        errors = router.metrics.discovery_errors
        source = SliceSource(
            slices,
            config.ports.engine,
            config.ports.control,
            lambda error: errors.labels(error).inc(),
            lambda found: router.replicas.publish(replicas_in(found, config.ports.admin)),
        )
    try:
        try:
            await router.start(source)
        except OSError as exc:
            raise ConfigError(f"cannot listen: {exc}") from exc
        number = await stop
        event(_log, logging.INFO, f"{number.name}: draining")
        delay = options.drain_delay if number is signal.SIGTERM else 0.0
        cut = await router.drain(delay, options.grace)
        event(_log, logging.INFO, "stopped", cut=cut)
    finally:
        await router.stop()
        if slices is not None:
            await slices.close()
    return 0


def _on_signal(stop: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if stop.done():
        # The second signal: the user does not want to wait. The default action ends the process.
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.raise_signal(number)
    else:
        stop.set_result(number)


if __name__ == "__main__":
    sys.exit(main())
