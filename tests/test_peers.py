"""Peers: ranks that are killed, stopped, cut off, that leave or give up, and how soon the others know."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peer_ranks import Rank

from gradpack._C import Peers


@contextmanager
def group(size: int, connect: bool = True, **options: Any) -> Iterator[list[Rank]]:
    """`size` ranks in processes of their own, connected; `host="other"` puts each on a host of its own."""
    ranks = [Rank(rank) for rank in range(size)]
    try:
        for rank in ranks:
            own = {name: f"{value}{rank.rank}" if name == "host" else value for name, value in options.items()}
            rank.call("make", size, own)
        if connect:
            cards = [rank.call("card") for rank in ranks]
            for rank in ranks:
                rank.call("connect", cards)
            assert everywhere(ranks, "wait_connected", 5.0) == [True] * size
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def everywhere(ranks: list[Rank], method: str, *args: Any) -> list[Any]:
    """On all at the same time."""
    for rank in ranks:
        rank.send(method, *args)
    return [rank.result() for rank in ranks]


def heads(verdicts: list[Any]) -> list[Any]:
    return [verdict and verdict[:2] for verdict in verdicts]


def within(seconds: float, what: Callable[[], Any]) -> Any:
    began = time.monotonic()
    found = what()
    assert time.monotonic() - began < seconds
    return found


def port_of(card: bytes) -> int:
    return int(struct.unpack_from("<H", card, 68)[0])


def token_of(card: bytes) -> bytes:
    return card[72:88]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_meet_and_say_where_they_are(size: int) -> None:
    with group(size, host_timeout=0.3) as ranks:  # one that would show beats, which there are between hosts only
        for rank in ranks:
            rank.call("enter", 1)
            rank.call("leave")
            rank.call("enter", 10 + rank.rank)
            rank.call("step", 3 * rank.rank)
        ranks[-1].call("leave")
        wanted = [(10 + rank, rank != size - 1, 3 * rank) for rank in range(size)]
        assert within(2, lambda: everywhere(ranks, "positions", 5.0)) == [wanted] * size
        assert everywhere(ranks, "unreached") == [[]] * size
        assert everywhere(ranks, "verdict", 100, 0.0) == [None] * size
        time.sleep(0.2)  # the threads go to sleep
        before = everywhere(ranks, "wake_ups")
        time.sleep(0.3)
        assert everywhere(ranks, "wake_ups") == before


# As ranks on other hosts they have no handle of the process, and the end of the connection is all there is to see.
@pytest.mark.parametrize("options", [{}, {"host": "other"}], ids=["one-host", "hosts"])
@pytest.mark.parametrize("forking", [1, 0], ids=["victim-forked", "survivor-forked"])
def test_a_killed_rank_is_gone_though_a_forked_child_lives(options: dict[str, Any], forking: int) -> None:
    if options and not has_address():
        pytest.skip("no address but loopback")
    with group(3, **options) as ranks:
        assert ranks[forking].call("fork", "sleep") > 0
        began = time.monotonic()
        ranks[1].kill()
        found = everywhere([ranks[0], ranks[2]], "verdict", 1, 5.0)
        assert time.monotonic() - began < 1
        assert heads(found) == [("gone", 1)] * 2
        assert all("ended" in text for _, _, text in found)
        assert within(2, lambda: ranks[2].call("positions", 5.0)) == [(0, False, 0), None, (0, False, 0)]


def has_address() -> bool:
    listed = subprocess.run(["ip", "-o", "addr", "show", "scope", "global", "up"], capture_output=True, text=True)
    return bool(listed.stdout.strip())


def test_a_killed_rank_is_gone_though_another_process_got_its_connections() -> None:
    with group(2) as ranks:
        ranks[1].call("fork", "copies")  # only the handle of the process tells
        ranks[1].kill()
        assert heads([within(1, lambda: ranks[0].call("verdict", 1, 5.0))]) == [("gone", 1)]


def test_objects_in_a_forked_child_refuse_and_the_parent_goes_on() -> None:
    with group(2) as ranks:
        told = ranks[0].call("fork", "use")
        assert len(told) == 11
        assert set(told) == {"RuntimeError: Peers: found an object of the parent process in a forked child"}
        assert everywhere(ranks, "positions", 2.0) == [[(0, False, 0)] * 2] * 2
        assert everywhere(ranks, "verdict", 1, 0.3) == [None] * 2


def test_a_stopped_rank_is_not_gone() -> None:
    with group(3) as ranks:
        ranks[1].call("enter", 4)
        ranks[2].call("enter", 5)
        ranks[1].signal(signal.SIGSTOP)
        assert everywhere([ranks[0], ranks[2]], "verdict", 9, 1.5) == [None, None]
        assert ranks[0].call("positions", 0.3) == [(0, False, 0), None, (5, True, 0)]
        ranks[1].signal(signal.SIGCONT)
        assert within(1, lambda: ranks[0].call("positions", 5.0)) == [(0, False, 0), (4, True, 0), (5, True, 0)]
        ranks[1].call("enter", 6)  # what a stale answer would not know
        assert ranks[0].call("positions", 5.0)[1] == (6, True, 0)
        assert everywhere(ranks, "verdict", 9, 0.0) == [None] * 3


def unread_bytes(pid: int) -> int:
    """What has come over connections of a process and not been read."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in links)


def test_a_rank_that_stays_stopped_is_not_sent_beats_for_ever() -> None:
    if not has_address():
        pytest.skip("no address but loopback")
    with group(2, host="other", host_timeout=0.3) as ranks:
        ranks[1].signal(signal.SIGSTOP)
        assert ranks[0].call("verdict", 1, 4.3) is None
        assert 0 < unread_bytes(ranks[1].pid) <= 64 * 4
        ranks[1].signal(signal.SIGCONT)
        assert within(1, lambda: ranks[0].call("positions", 5.0)) == [(0, False, 0)] * 2


def test_giving_up_reaches_all_and_goes_before_the_rest() -> None:
    with group(4) as ranks:
        ranks[3].kill()
        assert heads(everywhere(ranks[:3], "verdict", 1, 2.0)) == [("gone", 3)] * 3
        began = time.monotonic()
        ranks[2].call("give_up", "LayoutMismatch", "a" + "é" * 1500)
        found = everywhere(ranks[:2], "first_gave_up", 2.0)
        assert time.monotonic() - began < 0.3
        assert found == [("gave_up", 2, "LayoutMismatch\na" + "é" * 999)] * 2
        assert everywhere(ranks[:1], "give_up", "Own", "lone surrogate: \udc80") == [None]
        assert ranks[2].call("first_gave_up", 2.0) == ("gave_up", 0, "Own\nlone surrogate: \\udc80")
        assert ranks[1].call("verdict", 1, 0.0)[1] == 2  # the first goes before later ones too


def test_a_rank_that_gave_up_before_the_others_came_is_heard() -> None:
    with group(2, connect=False) as ranks:
        cards = [rank.call("card") for rank in ranks]
        within(0.5, lambda: ranks[1].call("give_up", "Early", "before connect"))
        for rank in ranks:
            rank.call("connect", cards)
        assert ranks[0].call("verdict", 1, 2.0) == ("gave_up", 1, "Early\nbefore connect")


def test_a_rank_that_left_is_bad_news_only_for_calls_it_did_not_finish() -> None:
    with group(3) as ranks:
        for call in (1, 2):
            ranks[1].call("enter", call)
            ranks[1].call("leave")
        ranks[2].call("enter", 1)
        ranks[2].call("leave")
        ranks[2].call("enter", 2)  # closed inside
        within(0.5, lambda: ranks[1].call("close_and_exit"))
        assert everywhere([ranks[0], ranks[2]], "verdict", 2, 0.5) == [None, None]
        assert ranks[0].call("verdict", 3, 0.0) == ("left", 1, "it closed, having finished 2 calls")
        ranks[2].call("close")
        ranks[2].call("close")
        assert ranks[0].call("verdict", 2, 1.0) == ("left", 2, "it closed, having finished 1 calls")
        assert ranks[0].call("verdict", 1, 0.3) is None  # though the processes of both ended
        assert ranks[0].call("positions", 5.0)[1:] == [None, None]


def hello(rank: int, token: bytes, version: int = 1) -> bytes:
    return struct.pack("<HBBII", 24, 0, 0, version, rank) + token


def test_strangers_are_dropped_and_disturb_nothing() -> None:
    with group(2, connect=False) as ranks:
        cards = [rank.call("card") for rank in ranks]
        ranks[0].call("connect", cards)
        token = token_of(cards[0])
        silent = socket.create_connection(("127.0.0.1", port_of(cards[0])), timeout=5)
        wrong = bytes([token[0] ^ 1]) + token[1:]
        for sent in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(100_000),
            hello(1, wrong),
            hello(1, token, 2),
            hello(0, token),
            hello(9, token),
        ):
            assert answer_to(cards[0], sent) == b""
        # The right token shows that the frames above are right but for what is wrong on purpose. As an attempt that was given
        # up, it does not count.
        assert answer_to(cards[0], hello(1, token)) == struct.pack("<HBBII", 24, 0, 0, 1, 0) + token_of(cards[1])
        assert ranks[0].call("unreached") == [1]
        ranks[1].call("connect", cards)
        assert everywhere(ranks, "wait_connected", 2.0) == [True, True]
        assert everywhere(ranks, "verdict", 1, 0.3) == [None, None]
        assert everywhere(ranks, "positions", 2.0) == [[(0, False, 0)] * 2] * 2
        silent.close()


def answer_to(card: bytes, sent: bytes) -> bytes:
    """What comes before the end of the connection or, once it is a whole hello, before this side ends it."""
    got = b""
    with socket.create_connection(("127.0.0.1", port_of(card)), timeout=3) as stranger:
        try:
            stranger.sendall(sent)
            while len(got) < 28 and (part := stranger.recv(100)):
                got += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return got


def test_ranks_that_do_not_come_are_named() -> None:
    with group(4, connect=False) as ranks:
        cards = [rank.call("card") for rank in ranks]
        for rank in ranks[1:3]:
            rank.call("connect", cards)
        assert within(0.7, lambda: everywhere(ranks[1:3], "wait_connected", 0.4)) == [False, False]
        assert everywhere(ranks[1:3], "unreached") == [[0, 3], [0, 3]]
        assert everywhere(ranks[1:3], "verdict", 1, 0.0) == [None, None]
        ranks[3].kill()
        assert within(1, lambda: everywhere(ranks[1:3], "wait_connected", 5.0)) == [False, False]
        assert heads(everywhere(ranks[1:3], "verdict", 1, 0.0)) == [("gone", 3)] * 2
        time.sleep(1.2)  # attempts to reach rank 0 that were given up wait in its listening socket
        ranks[0].call("connect", cards)
        deadline = time.monotonic() + 5
        while ranks[1].call("unreached") != [3] or ranks[2].call("unreached") != [3] or ranks[0].call("unreached") != [3]:
            assert time.monotonic() < deadline
        assert heads(everywhere(ranks[:3], "verdict", 1, 0.3)) == [("gone", 3)] * 3


def test_many_objects_leave_nothing_behind() -> None:
    def here() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once(connect: bool) -> None:
        pair = [Peers(rank, 2, 5.0, "") for rank in range(2)]
        if connect:
            cards = [peers.card() for peers in pair]
            for peers in pair:
                peers.connect(cards)
            assert pair[1].wait_connected(5)
        pair[0].close()  # the other goes by its destructor

    once(True)
    before = here()
    for turn in range(200):
        once(turn % 4 != 0)
    # Fewer where something of an earlier test was still on its way out.
    assert all(now <= then for now, then in zip(here(), before, strict=True)), (here(), before)


def test_closing_wakes_who_waits() -> None:
    peers = Peers(0, 2, 5.0, "")
    other = Peers(1, 2, 5.0, "")
    peers.connect([peers.card(), other.card()])
    found: list[Any] = []
    waits = [lambda: peers.verdict(1, 20), lambda: peers.wait_connected(20), lambda: peers.positions(20)]
    threads = [threading.Thread(target=lambda wait=wait: found.append(wait())) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    within(0.3, peers.close)
    for thread in threads:
        thread.join(2)
    assert len(found) == 3 and all(value in found for value in (None, False, [(0, False, 0), None]))
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda cards: cards[:1], r"cards: found 1, wanted one for each of 2 ranks"),
        (lambda cards: [cards[0], b"short"], r"the card of rank 1: found 5 bytes, wanted at least 88"),
        (lambda cards: [cards[0], cards[1] + b"x"], r"the card of rank 1: found \d+ bytes, wanted \d+$"),
        (lambda cards: [cards[0], b"\x07" + cards[1][1:]], r"the card of rank 1: found version 7 in \d+ bytes, wanted version 1"),
        (lambda cards: [cards[1], cards[1]], r"the card of rank 0: found another object's"),
    ],
)
def test_a_wrong_card_is_refused_by_its_rank(change: Callable[[list[bytes]], list[bytes]], error: str) -> None:
    peers = Peers(0, 2, 5.0, "")
    assert len(peers.card()) <= 4096
    with pytest.raises(ValueError, match=error):
        peers.connect(change([peers.card(), Peers(1, 2, 5.0, "").card()]))


def test_what_cannot_be_is_refused() -> None:
    for arguments in (
        (2, 2, 1.0, ""),
        (-1, 2, 1.0, ""),
        (0, 0, 1.0, ""),
        (0, 1, 0.0, ""),
        (0, 1, 1e9, ""),
        (0, 1, float("nan"), ""),
    ):
        with pytest.raises(ValueError, match="Peers: "):
            Peers(*arguments)
    peers = Peers(0, 1, 1.0, "")
    for method, argument in ((peers.enter, 0), (peers.enter, 1 << 39), (peers.step, -1), (peers.step, 1 << 24)):
        with pytest.raises(ValueError, match="Peers"):
            method(argument)
    with pytest.raises(ValueError, match="wanted one line"):
        peers.give_up("two\nlines", "")
    peers.connect([peers.card()])
    with pytest.raises(RuntimeError, match="connecting already"):
        peers.connect([peers.card()])
    peers.close()
    with pytest.raises(RuntimeError, match="found the object closed"):
        peers.connect([peers.card()])


def test_without_descriptors_it_is_an_os_error() -> None:
    rank = Rank(0)
    try:
        assert rank.call("exhausted") == (24, "[Errno 24] socket: Too many open files")
    finally:
        rank.end()


# ---- Two hosts: a network namespace each, joined by a cable ----------------------------------------------------------------

HOST_TIMEOUT = 1.2


@contextmanager
def two_hosts() -> Iterator[list[Rank]]:
    ranks = [Rank(rank) for rank in range(2)]
    try:
        if not all(everywhere(ranks, "unshare_network")):
            pytest.skip("no network namespaces here")
        in_first = ["nsenter", "--net", f"--target={ranks[0].pid}", "ip"]
        subprocess.run([*in_first, "link", "add", "spare0", "type", "veth", "peer", "name", "spare1"], capture_output=True)
        cable = [*in_first, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", str(ranks[1].pid)]
        if not Path("/usr/bin/nsenter").exists() or subprocess.run(cable, capture_output=True).returncode:
            pytest.skip("no veth pairs here")
        for rank in ranks:
            inside = ["nsenter", "--net", f"--target={rank.pid}", "ip"]
            subprocess.run([*inside, "addr", "add", f"10.77.0.{rank.rank + 1}/24", "dev", f"cable{rank.rank}"], check=True)
            subprocess.run([*inside, "link", "set", f"cable{rank.rank}", "up"], check=True)
        spare = [*in_first, "addr", "add", "10.88.0.1/24", "dev", "spare0"]
        subprocess.run(spare, check=True)
        subprocess.run([*in_first, "link", "set", "spare0", "up"], check=True)
        for rank in ranks:
            rank.call("make", 2, {"host_timeout": HOST_TIMEOUT, "interface": f"cable{rank.rank},lo", "host": f"host{rank.rank}"})
        cards = [rank.call("card") for rank in ranks]
        for rank in ranks:
            rank.call("connect", cards)
        assert addresses_of(cards[0])[:2] == ["10.77.0.1", "10.88.0.1"]
        assert everywhere(ranks, "wait_connected", 8.0) == [True, True]
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def addresses_of(card: bytes) -> list[str]:
    """IPv4 only, in order."""
    entries = [card[place : place + 18] for place in range(88, len(card), 18)]
    return [socket.inet_ntoa(entry[2:6]) for entry in entries if entry[1] == 4]


def test_a_host_that_is_cut_off_is_silent_and_one_that_is_stopped_is_not() -> None:
    with two_hosts() as ranks:
        ranks[1].signal(signal.SIGSTOP)
        assert ranks[0].call("verdict", 1, 3 * HOST_TIMEOUT) is None
        ranks[1].signal(signal.SIGCONT)
        assert within(1, lambda: ranks[0].call("positions", 5.0)) == [(0, False, 0)] * 2
        assert everywhere(ranks, "verdict", 1, 2 * HOST_TIMEOUT) == [None, None]
        cut = ["nsenter", "--net", f"--target={ranks[1].pid}", "ip", "link", "set", "cable1", "down"]
        subprocess.run(cut, check=True)
        began = time.monotonic()
        found = everywhere(ranks, "verdict", 1, HOST_TIMEOUT + 5)
        assert time.monotonic() - began < HOST_TIMEOUT + 1
        assert heads(found) == [("silent", 1), ("silent", 0)]
        assert all("no longer answers" in text for _, _, text in found)
