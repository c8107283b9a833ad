"""Why a worker failed, by its end, its words and what was seen beside it."""

import signal
from types import SimpleNamespace

import pytest

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.elastic import health_monitor
from resilient.elastic.health_monitor import GpuWatch, OomWatch, find_stragglers
from resilient.elastic.outcome import NO_EVIDENCE, Cause, Evidence, find_cause

KILLED = -signal.SIGKILL
GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("status", "code", "message", "cause"),
    [
        (7, "", "", Cause.EXIT),
        (1, "", "ValueError: boom", Cause.EXIT),
        (-signal.SIGSEGV, "", "", Cause.SIGNAL),
        (KILLED, "", "", Cause.SIGNAL),
        (73, "RES-STORE-507", "StoreFull: no", Cause.DISK_FULL),
        (1, "", "OSError: [Errno 28] No space left on device: 'x'", Cause.DISK_FULL),
        (1, "", "OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL),
        (1, "", "OSError: [Errno 2] No such file", Cause.EXIT),
        (69, "RES-STORE-503", "StoreUnavailable: no answer", Cause.STORAGE_UNREACHABLE),
        (69, "RES-PEER", "PeerFailed: gone", Cause.PEER),
        (69, "RES-DEADLINE", "DeadlineExceeded: silence", Cause.PEER),
        (1, "", f"RuntimeError: [{GLOO}:537] Read error [::1]:2: Connection reset", Cause.PEER),
        (1, "", f"RuntimeError: [{GLOO}:534] Connection closed by peer [::1]:2", Cause.PEER),
        (1, "", f"RuntimeError: [{GLOO}:81] Timed out waiting 1800000ms", Cause.EXIT),
        (1, "", "DistNetworkError: Failed to recv. Connection was likely closed.", Cause.PEER),
        (1, "", "DistNetworkError: Broken pipe", Cause.PEER),
        (1, "", "DistBackendError: x\nncclRemoteError: A call failed", Cause.PEER),
        (1, "", "DistBackendError: NCCL error: unhandled cuda error", Cause.EXIT),
        (1, "", "ConnectionResetError: [Errno 104] Connection reset by peer", Cause.EXIT),
        (70, "RES-NUMBERS", "NumbersBroken: nan", Cause.NUMBERS),
        (1, "", "AcceleratorError: CUDA error: an illegal memory access", Cause.GPU),
        (1, "", "OutOfMemoryError: CUDA out of memory.", Cause.EXIT),
        (1, "", LOADER, Cause.EXIT),
    ],
)
def test_the_end_and_the_words_of_a_worker_tell_its_cause(status, code, message, cause):
    assert find_cause(status, code, message, NO_EVIDENCE)[0] is cause


@pytest.mark.parametrize(
    ("status", "message", "seen", "cause", "proof"),
    [
        (KILLED, "", Evidence(1, 1), Cause.OOM_KILL, "control group: 1"),
        (KILLED, "", Evidence(0, 5), Cause.SIGNAL, "not the out-of-memory killer"),
        (KILLED, "", Evidence(None, 2), Cause.OOM_KILL, "most likely"),
        (KILLED, "", Evidence(None, 0), Cause.SIGNAL, ""),
        (1, LOADER, Evidence(1, 1), Cause.OOM_KILL, "control group: 1"),
        (1, "ValueError: x", Evidence(1, 1), Cause.EXIT, ""),
        (1, "", Evidence(gpu_faults=("GPU 0 reported Xid 79",)), Cause.GPU, "Xid 79"),
        (-15, "", Evidence(3, 3), Cause.SIGNAL, ""),
    ],
)
def test_a_kill_for_memory_is_told_apart_from_any_other(status, message, seen, cause, proof):
    found, said = find_cause(status, "", message, seen)
    assert found is cause
    assert proof in said


@pytest.fixture
def machine(tmp_path):
    """A machine whose files the test writes."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/vmstat", "pgfault 9\noom_kill 4\n")
    return tmp_path, write


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events"),
        ("9:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control"),
    ],
)
def test_both_versions_of_control_groups_are_read(machine, line, file):
    root, write = machine
    write("proc/7/cgroup", f"3:cpu,cpuacct:/x\n{line}\n")
    write(file, "low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    watch = OomWatch(root)
    watch.begin()
    assert watch.kills() is None
    watch.learn([7, 8])
    assert watch.kills() == 0
    write(file, "low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    watch.learn([7])
    assert watch.kills() == 1
    watch.begin()
    watch.learn([7])
    assert watch.kills() == 0


def test_the_machine_counts_too(machine):
    root, write = machine
    watch = OomWatch(root)
    assert watch.machine_kills() is None
    watch.begin()
    write("proc/vmstat", "oom_kill 6\n")
    assert watch.machine_kills() == 2


class Nvml:
    """The part of pynvml that is used, as its documentation has it."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, reported):
        kinds = {"SingleBitEcc": 1, "DoubleBitEcc": 2, "XidCritical": 8}
        for name, value in kinds.items():
            setattr(self, f"nvmlEventType{name}Error", value)
        self.reported = list(reported)
        self.registered = {}

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlEventSetCreate(self):  # noqa: N802
        return "set"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802
        return f"device-{number}"

    def nvmlDeviceGetSupportedEventTypes(self, device):  # noqa: N802
        return 0xFF if device == "device-1" else 0

    def nvmlDeviceRegisterEvents(self, device, wanted, events):  # noqa: N802
        self.registered[device] = (wanted, events)

    def nvmlDeviceGetIndex(self, device):  # noqa: N802
        return int(device[-1])

    def nvmlEventSetWait_v2(self, _events, milliseconds):  # noqa: N802
        assert milliseconds == 0
        if not self.reported:
            raise self.NVMLError("timeout")
        kind, data = self.reported.pop(0)
        return SimpleNamespace(device="device-1", eventType=kind, eventData=data)


def test_errors_of_devices_are_heard_where_they_can_be(monkeypatch):
    nvml = Nvml([(8, 79), (8, 13), (2, 0), (1, 0)])
    monkeypatch.setattr(health_monitor, "import_module", lambda _: nvml)
    watch = GpuWatch()
    assert watch.start()
    assert nvml.registered == {"device-1": (11, "set")}
    found = watch.look()
    assert [(one.device, one.kind, one.number, one.is_broken) for one in found] == [
        (1, "xid", 79, True),
        (1, "xid", 13, False),
        (1, "ecc_double_bit", 0, True),
        (1, "ecc_single_bit", 0, False),
    ]
    assert "GPU 1 reported Xid 79; drain this host" in found[0].message()
    assert watch.look() == []


def test_a_device_that_breaks_is_the_cause_of_the_connections_that_it_takes_along():
    lost = "DistBackendError: NCCL error: ncclRemoteError, remote process exiting"
    assert find_cause(1, "", lost, NO_EVIDENCE) == (Cause.PEER, "")
    broken = Evidence(gpu_faults=("GPU 1 reported Xid 74",))
    assert find_cause(1, "", lost, broken) == (Cause.GPU, "GPU 1 reported Xid 74")


def test_without_the_package_or_a_driver_nothing_is_watched(monkeypatch):
    def missing(_):
        raise ImportError

    monkeypatch.setattr(health_monitor, "import_module", missing)
    watch = GpuWatch()
    assert not watch.start()
    assert watch.look() == []
    nvml = Nvml([])
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError("no driver"))
    monkeypatch.setattr(health_monitor, "import_module", lambda _: nvml)
    assert not GpuWatch().start()


def own(*seconds):
    return ProgressRecord(9, Phase.STEP, 0.0, (), (), seconds)


def test_the_slow_one_is_a_straggler():
    signs = {0: own(*[0.1] * 10), 1: own(*[0.1] * 9, 5.0), 2: own(*[0.3] * 10)}
    assert [(one.rank, one.own_seconds) for one in find_stragglers(signs)] == [(2, 0.3)]


@pytest.mark.parametrize(
    "signs",
    [
        {},
        {0: own(*[9.0] * 10)},
        {0: own(*[0.1] * 10), 1: own(*[9.0] * 9)},  # too few steps
        {0: own(*[0.10] * 10), 1: own(*[0.14] * 10)},  # not that much slower
        {0: own(*[0.001] * 10), 1: own(*[0.009] * 10)},  # too little to matter
    ],
)
def test_nobody_is_a_straggler_for_little(signs):
    assert find_stragglers(signs) == []
