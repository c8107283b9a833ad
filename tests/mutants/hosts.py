"""Defects of how hosts meet, and of how they end together."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SILENT = "tests/unit/elastic/test_member_silent.py"
MEMBERS = "tests/unit/elastic/test_membership.py"
CLOSED = "tests/unit/elastic/test_closed_rendezvous.py"
SLICE = "tests/simulation/hosts -k slice"
ENDINGS = "tests/unit/elastic/test_endings_together.py"
PARTING = "tests/unit/elastic/test_parting.py"
WATCH = "resilient/elastic/attempt_monitor.py"

MUTANTS = [
    Mutant(
        "a host is accused that does not serve the rendezvous",
        "resilient/elastic/rendezvous/roster.py",
        "[agent for agent in there if found[server] & found[agent]]",
        "list(there)",
        MEMBERS,
    ),
    Mutant(
        "a host that is one too many calls all others back",
        "resilient/elastic/rendezvous/membership.py",
        "waiting > 0 and has_room(self._handler)",
        "waiting > 0",
        MEMBERS,
    ),
    Mutant(
        "a host that is done is called back by one that comes late",
        "resilient/elastic/attempt_monitor.py",
        "            if not self._barrier.can_pass(self._members.left()):\n"
        "                return self._regroup()\n"
        "            self._members.overlook()\n",
        "            return self._regroup()\n",
        ENDINGS,
    ),
    Mutant(
        "a host that is done waits for one that has left before it was",
        "resilient/elastic/rendezvous/membership.py",
        'f"resilient/done/{node}" for node in (self._node, *left)',
        'f"resilient/done/{node}" for node in (self._node,)',
        MEMBERS,
    ),
    Mutant(
        "fewer hosts than are needed start, or a world with a hole",
        "resilient/elastic/rendezvous/connect.py",
        "        _require_whole(self.members, handler)\n",
        "",
        SILENT,
    ),
    Mutant(
        "a host starts a life of another world",
        "resilient/elastic/rendezvous/attempt.py",
        "if planned.nodes != group.group_world_size:",
        "if False:",
        SILENT,
    ),
    Mutant(
        "a host that died while the others started was never there",
        "resilient/elastic/rendezvous/roster.py",
        "known: Any = store if isinstance(store, RoundStore) else None",
        "known: Any = None",
        SILENT,
    ),
    Mutant(
        "the host of the life's store leaves while others still save",
        "resilient/elastic/rendezvous/leave.py",
        "        while roster.waits_for_goodbyes(group.group_rank):\n",
        "        while False:\n",
        ENDINGS,
    ),
    Mutant(
        "a host that waited for room ends with 69 though the run is done",
        "resilient/elastic/rendezvous/leave.py",
        "    if has_waited and _has_ended_well(handler):\n",
        "    if False:\n",
        CLOSED,
    ),
    Mutant(
        "a host that waited for room ends with 0 though the run was given up",
        "resilient/elastic/rendezvous/leave.py",
        "    if has_waited and _has_ended_well(handler):\n",
        "    if has_waited:\n",
        CLOSED,
    ),
    Mutant(
        "a host that a newer life has shut out closes the rendezvous of that one",
        "resilient/elastic/rendezvous/leave.py",
        "    if code in _OPEN_CODES:\n        return False\n",
        "",
        ENDINGS,
    ),
    Mutant(
        "a host that the others have gone on without gives up for them",
        "resilient/elastic/rendezvous/leave.py",
        "    return group.group_rank is None or group.group_rank not in roster.left()\n",
        "    return True\n",
        ENDINGS,
    ),
    Mutant(
        "hosts that wait for room do not hear that the run is over",
        "resilient/elastic/rendezvous/leave.py",
        "            clock.sleep(_HEARD_SECONDS)\n",
        "            clock.sleep(0.0)\n",
        ENDINGS,
    ),
    Mutant(
        "ranks are stopped for a newcomer before the other hosts are told why",
        "resilient/elastic/attempt_monitor.py",
        "            self._members.tell()\n",
        "",
        ENDINGS,
    ),
    Mutant(
        "a host takes ranks that another one stopped for preempted",
        "resilient/elastic/rendezvous/membership.py",
        "self.is_changed = self.is_changed or bool(regrouping)",
        "self.is_changed = bool(self.is_changed)",
        MEMBERS,
    ),
    Mutant(
        "a host that was dropped from the round counts as preempted",
        "resilient/elastic/rendezvous/roster.py",
        'return "left" if is_left else ""',
        'return ""',
        MEMBERS,
    ),
    Mutant(
        "a host that is asked to stop when it is done does not say that it is",
        "resilient/elastic/attempt_monitor.py",
        "            self._tell_done(request)\n",
        "            pass\n",
        ENDINGS,
    ),
    Mutant(
        "a host that is one too many calls all others back, as the simulator sees it",
        "resilient/elastic/rendezvous/membership.py",
        "len(holder.state.participants) < settings.max_nodes",
        "True",
        SLICE,
    ),
    Mutant(
        "a host leaves while others still save, as the simulator sees it",
        "resilient/elastic/rendezvous/leave.py",
        "            if left_seconds <= _OUT_SECONDS:\n",
        "            if True:\n",
        SLICE,
    ),
    Mutant(
        "a meeting that somebody left is over for good",
        "resilient/elastic/rendezvous/connect.py",
        "> _join_seconds(spec.rdzv_handler):",
        "> 0:",
        SILENT,
    ),
    Mutant(
        "a host that gives up does not say why",
        "resilient/elastic/rendezvous/leave.py",
        "is_given_up and _tell_why(group.spec.rdzv_handler, action)",
        "is_given_up",
        "tests/unit/elastic/test_closed_rendezvous.py",
    ),
    Mutant(
        "the last host that gives up says why",
        "resilient/elastic/rendezvous/leave.py",
        'store.compare_set(_why_key(handler), "", json.dumps(message))',
        "store.set(_why_key(handler), json.dumps(message))",
        "tests/unit/elastic/test_closed_rendezvous.py",
    ),
    Mutant(
        "who serves the rendezvous gives up before others can hear why",
        "resilient/elastic/rendezvous/leave.py",
        " or (is_told and roster.nodes > 1)",
        "",
        "tests/unit/elastic/test_closed_rendezvous.py",
    ),
    Mutant(
        "the code of who gave up is not that of the others",
        "resilient/elastic/restart_policy.py",
        "exit_code(outcome.status) or PeerFailed.exit_code",
        "PeerFailed.exit_code",
        "tests/unit/elastic/test_closed_rendezvous.py",
    ),
    Mutant(
        "hosts go on although fewer are left than they must be",
        "resilient/elastic/rendezvous/roster.py",
        " and left >= nodes_min",
        "",
        PARTING,
    ),
    Mutant(
        "hosts go on where nobody knows who was asked",
        "resilient/elastic/rendezvous/roster.py",
        "bool(asked) and all(",
        "all(",
        PARTING,
    ),
    Mutant(
        "hosts go on although the whole run was asked to stop",
        "resilient/elastic/rendezvous/roster.py",
        ("how == LeaveScope.ALONE.value for how in asked"),
        "bool(how) for how in asked",
        PARTING,
    ),
    Mutant(
        "hosts go on to meet where the rendezvous leaves with its host",
        "resilient/elastic/rendezvous/roster.py",
        (
            "        if is_served_here(self._handler):\n"
            "            how = LeaveScope.WITH_RENDEZVOUS\n"
        ),
        "",
        PARTING,
    ),
    Mutant(
        "whoever is connected to the rendezvous serves it",
        "resilient/elastic/rendezvous/roster.py",
        "bool(is_listening) and listener",
        "listener",
        PARTING,
    ),
    Mutant(
        "a host that leaves is waited for until its heartbeats are missed",
        "resilient/elastic/rendezvous/leave.py",
        "        handler._op_executor.run(_RendezvousExitOp(), deadline)  # noqa: SLF001\n",
        "",
        PARTING,
    ),
    Mutant(
        "a host is asked to leave and its ranks tell the others first",
        "resilient/elastic/attempt_monitor.py",
        (
            "            self._members.part(self._told)\n"
            "            write_stop_request(self._notes, self._told)\n"
            "        self._group.signal(signal.SIGTERM)\n"
        ),
        (
            "            write_stop_request(self._notes, self._told)\n"
            "        self._group.signal(signal.SIGTERM)\n"
            "        self._members.part(self._told or self._stops.request)\n"
        ),
        PARTING,
    ),
    Mutant(
        "a host that was asked itself goes on with the others",
        "resilient/elastic/rendezvous/membership.py",
        "        if request is None:\n            return self._roster.stay()\n",
        "        if request is None or self._roster:\n            return self._roster.stay()\n",
        PARTING,
    ),
    Mutant(
        "hosts that were not asked leave with those that were",
        "resilient/elastic/restart_policy.py",
        "    if outcome.hosts_left:\n        return Restart",
        "    if False:\n        return Restart",
        PARTING,
    ),
    Mutant(
        "a request for all hosts is forgotten when another comes",
        "resilient/distributed/stop_request.py",
        "is_for_all = self.is_for_all or other.is_for_all",
        "is_for_all = other.is_for_all",
        PARTING,
    ),
    Mutant(
        "Ctrl-C takes one host out of a run",
        "resilient/elastic/signals.py",
        "is_for_all = number == signal.SIGINT",
        "is_for_all = False",
        PARTING,
    ),
    Mutant(
        "a host that left as asked is told as lost",
        "resilient/elastic/rendezvous/roster.py",
        " for node in self._missing() if node not in self._parted]",
        " for node in self._missing()]",
        PARTING,
    ),
    Mutant(
        "a run of which hosts may leave is not stopped as a whole",
        "cli/resilient_cli/commands/stop.py",
        "    if not this_host:\n",
        "    if False:\n",
        "tests/process/test_leaving_hosts.py -k from_one_host",
    ),
    Mutant(
        "who hears later that all are meant does not say so",
        WATCH,
        "            if is_told and self._stops.request is not self._told:\n",
        "            if False:\n",
        PARTING,
    ),
]
