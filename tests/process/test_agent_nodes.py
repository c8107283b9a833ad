"""Several agents that meet: one host plays the nodes."""

import signal
import socket

import pytest

from tests.helpers.agent_harness import wait_until

FINISH = """
say("life", f"{os.environ['WORLD_SIZE']} {os.environ['RESILIENT_ATTEMPT']} {life}")
"""
# Works until its folder or the one of node 0 holds a file `done`.
WORK = (
    FINISH
    + """
def stop(number, frame):
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
while not os.path.exists("../0/done"):
    time.sleep(0.02)
"""
)


def lives(agent):
    """Return world size, attempt and number of each life that a worker of this node saw."""
    return [tuple(line.split()) for line in agent.said("life")]


@pytest.mark.smoke
def test_two_nodes_are_one_world_with_one_name_for_its_life(node):
    agents = [node(FINISH, "2", "--nproc-per-node", "2") for _ in range(2)]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].err + agents[1].err
    seen = {life for agent in agents for life in lives(agent)}
    assert len(seen) == 1
    assert seen.pop()[0] == "4"
    ranks = sorted(path.suffix for agent in agents for path in agent.folder.glob("pid.*"))
    assert ranks == [".0", ".1", ".2", ".3"]


def test_a_node_that_finished_waits_for_the_others(node):
    first = node(FINISH, "2")
    # Had the first left, the second would have lost the rendezvous and this much time.
    second = node(FINISH + "time.sleep(2)", "2", "--grace", "0.5")
    assert [first.end(), second.end()] == [0, 0], first.err + second.err


def test_a_second_node_joins_and_the_count_of_lives_is_the_worlds(node):
    first = node(WORK, "1:2", "--max-restarts", "0")
    first.wait_for("life", 1)
    second = node(WORK, "1:2", "--max-restarts", "0")
    second.wait_for("life", 1)
    (first.folder / "done").touch()
    assert [first.end(), second.end()] == [0, 0], first.err + second.err
    assert [life[0] for life in lives(first)] == ["1", "2"]
    # The same name on both, and the joiner's first life is the world's second.
    assert lives(first)[1] == lives(second)[0] or lives(first)[1][1] == lives(second)[0][1]


def test_a_failed_node_restarts_all_and_costs_the_others_nothing(node):
    fail = WORK.replace("while", "if life == 1:\n    time.sleep(1)\n    sys.exit(5)\nwhile", 1)
    first = node(WORK, "2", "--max-restarts", "0")
    second = node(fail, "2", "--max-restarts", "1")
    second.wait_for("life", 2)
    first.wait_for("life", 2)
    (first.folder / "done").touch()
    assert [first.end(), second.end()] == [0, 0], first.err + second.err
    assert {life[1] for life in lives(first)} == {life[1] for life in lives(second)}


def test_a_killed_node_leaves_the_other_to_go_on_alone(node):
    # As a collective would: the peer's loss is an error, and only in the world of two.
    first = node(
        WORK.replace(
            "time.sleep(0.02)",
            "time.sleep(0.02)\n"
            '    if os.environ["WORLD_SIZE"] == "2" and os.path.exists("gone"): sys.exit(1)',
        ),
        "1:2",
    )
    first.wait_for("life", 1)
    second = node(WORK, "1:2")
    second.wait_for("life", 1)
    second.process.kill()
    second.process.wait()
    (first.folder / "gone").touch()
    first.wait_for("life", 3)
    (first.folder / "done").touch()
    assert first.end() == 0, first.err
    assert [life[0] for life in lives(first)] == ["1", "2", "1"]


LEAVES = WORK.replace("sys.exit(75)", "open('leaving', 'w').close(); sys.exit(75)")
# As the ranks of a world do that agreed to leave: this one was told by its peer.
FOLLOWS = WORK.replace(
    "time.sleep(0.02)",
    "time.sleep(0.02)\n    if life == 1 and os.path.exists('../0/leaving'):\n"
    "        time.sleep(DELAY)\n        sys.exit(75)",
)


def test_a_preempted_node_serves_the_rendezvous_until_the_others_have_saved(node):
    first = node(LEAVES, "2")
    second = node(FOLLOWS.replace("DELAY", "2"), "2")
    first.wait_for("life", 1)
    second.wait_for("life", 1)
    first.send(signal.SIGTERM)
    assert [first.end(), second.end()] == [75, 75], first.err + second.err
    assert "the rendezvous is unreachable" not in second.err


def test_a_node_without_time_takes_the_rendezvous_along_and_the_others_still_save(node):
    first = node(LEAVES, "2", "--grace", "3")
    second = node(FOLLOWS.replace("DELAY", "5"), "2")
    first.wait_for("life", 1)
    second.wait_for("life", 1)
    first.send(signal.SIGTERM)
    assert [first.end(), second.end()] == [75, 75], first.err + second.err
    assert "the rendezvous is unreachable" in second.err


@pytest.mark.parametrize("is_noticed_by", ["ranks", "agent"])
def test_the_others_wait_for_the_node_that_served_the_rendezvous_if_told_to(node, is_noticed_by):
    first = node(WORK, "2")
    fails = "time.sleep(0.02)\n    if life == 1 and os.path.exists('gone'): sys.exit(1)"
    second = node(
        WORK.replace("time.sleep(0.02)", fails),
        "2",
        *("--rdzv-conf", "last_call_timeout=1,is_host=false,read_timeout=5,join_timeout=60"),
        *("--grace", "1"),
    )
    second.wait_for("life", 1)
    first.process.kill()
    first.process.wait()
    if is_noticed_by == "ranks":
        (second.folder / "gone").touch()
    wait_until(lambda: "waiting up to" in second.err, "it to wait", second)
    third = node(WORK, "2")
    third.wait_for("life", 1)
    (first.folder / "done").touch()
    assert [second.end(), third.end()] == [0, 0], second.err + third.err
    assert [life[0] for life in lives(second)] == ["2", "2"]
    # The one that was there counts on, and the world with it.
    assert lives(third) == [life for life in lives(second) if life[2] == "2"]


def test_a_node_that_waits_for_another_to_serve_the_rendezvous_hears_a_stop(node):
    first = node(WORK, "2")
    told = "last_call_timeout=1,is_host=false,read_timeout=5,join_timeout=60"
    second = node(WORK, "2", "--rdzv-conf", told, "--grace", "1")
    second.wait_for("life", 1)
    first.process.kill()
    wait_until(lambda: "waiting up to" in second.err, "it to wait", second)
    second.send(signal.SIGTERM)
    assert second.end() == 75, second.err


def test_ranks_that_left_for_a_newcomer_come_back_although_their_agent_had_not_seen_it(node):
    first = node(LEAVES, "2:3")
    second = node(FOLLOWS.replace("DELAY", "0"), "2:3", "--monitor-interval", "30")
    first.wait_for("life", 1)
    second.wait_for("life", 1)
    third = node(WORK, "2:3")
    third.wait_for("life", 1)
    (first.folder / "done").touch()
    agents = (first, second, third)
    assert [agent.end() for agent in agents] == [0, 0, 0], "\n".join(a.err for a in agents)
    assert [life[0] for life in lives(second)] == ["2", "3"]


def test_a_rendezvous_that_nobody_serves_is_unreachable(train):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    conf = ("--rdzv-conf", "is_host=false,read_timeout=2")
    agent = train(FINISH, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *conf)
    assert agent.end() == 69, agent.err
    assert "cannot reach the rendezvous" in agent.err


def test_a_static_rendezvous_gives_the_ranks_that_it_was_told(train):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    # Node 1 asks for its second life before node 0 has named it.
    fail_once = FINISH + "if life == 1:\n    time.sleep(2 * (1 - rank))\n    sys.exit(1)"
    agents = [
        train(
            fail_once,
            *("--nnodes", "2", "--rdzv-backend", "static", "--node-rank", rank),
            *("--master-port", port),
        )
        for rank in ("0", "1")
    ]
    assert [agent.end() for agent in agents] == [0, 0], agents[0].err + agents[1].err
    for rank, agent in enumerate(agents):
        assert len(list(agent.folder.glob(f"pid.{rank}"))) == 1
    assert lives(agents[0]) == lives(agents[1])
    assert len(lives(agents[0])) == 2
