"""What the two sides of the connector share inside one engine. Pure."""

from __future__ import annotations

import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg_connector.config import ConnectorConfig
from disagg_connector.counters import Counters
from disagg_connector.direct import Direct
from disagg_connector.epochs import Epochs
from disagg_connector.landing import HeldBlocks
from disagg_connector.peers import Peers
from disagg_connector.ports import Channel, Clock, Orders, Pool, Steps
from disagg_connector.protocol import Peer, State
from disagg_connector.ranks import Sharding
from disagg_connector.sending import Sender


@dataclass
class Context:
    """Engine thread only, except `board`."""

    me: Callable[[], Peer]
    epochs: Epochs
    config: ConnectorConfig
    block_size: int
    sharding: Sharding
    pool: Pool
    channel: Channel
    clock: Clock
    steps: Steps
    counters: Counters
    direct: Direct
    sender: Sender
    held: HeldBlocks
    peers: Peers
    orders: Orders = field(default_factory=Orders)
    """For the workers, with the next step."""

    def objection(self, peer: Peer) -> str:
        """Why no KV is exchanged with an engine; empty if it can be."""
        if peer.fingerprint != self.me().fingerprint:
            return "another fingerprint"
        return self.sharding.objection(peer.tensor_parallel)

    def take_orders(self) -> Orders:
        orders, self.orders = self.orders, Orders()
        self.sender.fill(orders)
        orders.link = self.direct.path
        return orders

    @property
    def has_orders(self) -> bool:
        return not self.orders.empty


def new_xid() -> str:
    """The name of one transfer, unique for ever."""
    return uuid.uuid4().hex


# Ended and unknown keys are remembered for peers that ask late.
BOARD_SIZE = 16384


class Board:
    """How prefill's pushes are doing, readable from the control thread, so that `Status` is answered and
    leases are renewed while the engine thread is busy with a long step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._states: OrderedDict[str, State] = OrderedDict()
        self._renewed: OrderedDict[str, float] = OrderedDict()
        self._refused: Counter[str] = Counter()

    def refused(self, reason: str) -> None:
        """A message was refused by the control thread."""
        with self._lock:
            self._refused[reason] += 1

    def take_refused(self) -> dict[str, int]:
        """Refusals since the last call, by reason."""
        if not self._refused:
            return {}
        with self._lock:
            refused, self._refused = self._refused, Counter()
        return dict(refused)

    def set(self, key: str, state: State) -> None:
        with self._lock:
            self._states[key] = state
            self._states.move_to_end(key)
            while len(self._states) > BOARD_SIZE:
                self._states.popitem(last=False)

    def get(self, key: str) -> State:
        with self._lock:
            return self._states.get(key, "unknown")

    def ask(self, key: str, xid: str) -> State:
        """The state of a load, or of its request where the load has none yet; renews the lease."""
        with self._lock:
            self._renewed[key] = self._clock()
            self._renewed.move_to_end(key)
            while len(self._renewed) > BOARD_SIZE:
                self._renewed.popitem(last=False)
            if xid in self._states:
                return self._states[xid]
            return self._states.get(key, "unknown")

    def renewed(self, key: str) -> float:
        """When somebody last asked, or minus infinity."""
        with self._lock:
            return self._renewed.get(key, float("-inf"))

    def forget_renewal(self, key: str) -> None:
        with self._lock:
            self._renewed.pop(key, None)
