from __future__ import annotations

from collections.abc import Callable

from disagg_connector.peers import MAX_ENTRIES, RETRY_AFTER, Peers
from disagg_connector.protocol import WIRE_VERSION, Address, Peer, Reply, Request, Welcome

HOME = Address("10.0.0.1", 5700)


class Channel:
    def __init__(self) -> None:
        self.asked: list[Callable[[Reply | None], None]] = []

    def request(
        self, to: Address, message: Request, timeout: float, on_reply: Callable[[Reply | None], None]
    ) -> None:
        self.asked.append(on_reply)

    def answer(self, token: object, reply: Reply) -> None:
        raise AssertionError

    def probe(self, address: Address, on_refused: Callable[[], None]) -> None:
        raise AssertionError


class Setting:
    def __init__(self) -> None:
        self.now = 0.0
        self.channel = Channel()
        self.gone: list[Peer] = []
        self.ready: list[Peer] = []
        self.peers = Peers(
            self.channel,
            lambda: self.now,
            lambda: {"model": "m"},
            self.objection,
            self.gone.append,
            self.ready.append,
        )

    def objection(self, peer: Peer) -> str:
        return "" if (peer.fingerprint, peer.tensor_parallel) == ("fp", 1) else "unlike this one"

    def welcome(
        self, engine: str = "boot-1", fingerprint: str = "fp", wire: int = WIRE_VERSION, tp: int = 1
    ) -> Peer:
        peer = Peer(engine, HOME, "10.0.0.1", 5600, tp, fingerprint)
        self.channel.asked.pop()(Welcome(wire, "prefill", peer, {"model": "m"}))
        return peer


def test_an_address_is_asked_once_and_remembered() -> None:
    setting = Setting()
    assert setting.peers.resolve(HOME).verdict == "asking"
    assert setting.peers.resolve(HOME).verdict == "asking"
    assert len(setting.channel.asked) == 1
    peer = setting.welcome()
    assert setting.peers.resolve(HOME).peer == peer
    assert not setting.channel.asked


def test_silence_is_remembered_for_a_moment_then_asked_again() -> None:
    setting = Setting()
    setting.peers.resolve(HOME)
    setting.channel.asked.pop()(None)
    assert setting.peers.resolve(HOME).verdict == "unreachable"
    assert not setting.channel.asked
    setting.now += RETRY_AFTER
    assert setting.peers.resolve(HOME).verdict == "unreachable", "no turn waits for a dead address"
    assert len(setting.channel.asked) == 1
    setting.welcome()
    assert setting.peers.resolve(HOME).verdict == "ready"


def test_another_model_protocol_or_number_of_ranks_is_incompatible() -> None:
    for kind in ({"fingerprint": "other"}, {"wire": WIRE_VERSION + 1}, {"tp": 3}):
        setting = Setting()
        setting.peers.resolve(HOME)
        setting.welcome(**kind)
        assert setting.peers.resolve(HOME).verdict == "incompatible"
        assert setting.peers.resolve(HOME).peer is None


def test_a_restarted_peer_is_asked_for_and_the_old_one_given_up() -> None:
    setting = Setting()
    setting.peers.resolve(HOME)
    old = setting.welcome("boot-1")
    setting.peers.doubt(HOME)
    assert setting.peers.resolve(HOME).verdict == "asking"
    new = setting.welcome("boot-2")
    assert setting.peers.resolve(HOME).peer == new
    assert setting.gone == [old]


def test_a_peer_that_introduces_itself_replaces_the_one_before() -> None:
    setting = Setting()
    setting.peers.resolve(HOME)
    old = setting.welcome("boot-1")
    setting.peers.met(Peer("boot-2", HOME, "10.0.0.1", 5600, 1, "fp"))
    assert setting.gone == [old]
    found = setting.peers.resolve(HOME).peer
    assert found is not None
    assert found.engine_id == "boot-2"


def test_a_late_message_of_an_old_boot_does_not_bring_it_back() -> None:
    setting = Setting()
    old = Peer("boot-1", HOME, "10.0.0.1", 5600, 1, "fp")
    new = Peer("boot-2", HOME, "10.0.0.1", 5600, 1, "fp")
    assert setting.peers.met(old)
    assert setting.peers.met(new)
    assert not setting.peers.met(old)
    assert setting.peers.resolve(HOME).peer == new
    assert setting.gone == [old], "what the new boot may still write into stays held"


def test_a_later_epoch_is_learnt_and_an_older_one_is_not() -> None:
    setting = Setting()
    for epoch in (1, 3, 2):
        setting.peers.met(Peer("boot-1", HOME, "10.0.0.1", 5600, 1, "fp", epoch))
    found = setting.peers.resolve(HOME).peer
    assert found is not None
    assert found.epoch == 3
    assert not setting.gone


def test_a_peer_that_introduces_itself_need_not_be_asked() -> None:
    setting = Setting()
    peer = Peer("boot-1", HOME, "10.0.0.1", 5600, 1, "fp")
    setting.peers.met(peer)
    assert setting.peers.resolve(HOME).peer == peer
    assert not setting.channel.asked
    setting.peers.met(Peer("boot-2", HOME, "10.0.0.1", 5600, 1, "fp"))
    assert setting.gone == [peer], "what is kept of the old boot is dropped"


def test_a_peer_is_told_to_be_ready_once_a_boot() -> None:
    setting = Setting()
    setting.peers.resolve(HOME)
    first = setting.welcome("boot-1")
    setting.peers.met(first)
    setting.peers.doubt(HOME)
    setting.peers.resolve(HOME)
    setting.welcome("boot-1")
    assert setting.ready == [first]
    second = Peer("boot-2", HOME, "10.0.0.1", 5600, 1, "fp")
    setting.peers.met(second)
    assert setting.ready == [first, second]


def test_an_incompatible_peer_is_never_ready() -> None:
    setting = Setting()
    setting.peers.resolve(HOME)
    setting.welcome(fingerprint="other")
    assert not setting.ready


def test_params_that_name_ever_new_addresses_do_not_fill_the_memory() -> None:
    setting = Setting()
    for number in range(MAX_ENTRIES + 50):
        setting.peers.resolve(Address(f"host-{number}", 5700))
    assert len(setting.peers._entries) == MAX_ENTRIES
    asked = len(setting.channel.asked)
    assert setting.peers.resolve(Address("host-0", 5700)).verdict == "asking"
    assert len(setting.channel.asked) == asked + 1, "the oldest was forgotten"
