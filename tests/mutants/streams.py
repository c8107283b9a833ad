"""Defects of datasets without a length, of losses over labels, and of layers cut over ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STREAMS = "tests/unit/train/test_streams.py"
CUT = "tests/process/test_tensor_streams.py"
MESHES = "tests/unit/strategies/test_meshes.py"
LOSSES = "tests/unit/train/test_losses.py"
COMPILED = "tests/process/test_compiled_ranks.py -k plain_names"

MUTANTS = [
    Mutant(
        "an incomplete round counts as a whole one",
        "resilient/train/data/streaming.py",
        "        self.samples += taken\n",
        "        self.samples += deal.round_samples\n",
        STREAMS,
    ),
    Mutant(
        "a new pass begins where the old one ended",
        "resilient/train/data/streaming.py",
        ("        DataCursor.next_epoch(self)\n        self.state = None\n"),
        ("        DataCursor.next_epoch(self)\n"),
        STREAMS,
    ),
    Mutant(
        "nobody looks whether a step has all its micro-batches",
        "resilient/train/data/streaming.py",
        "return self.ahead.fill(self.accumulation)",
        "return min(1, self.ahead.fill(1))",
        f"{STREAMS} -k last_group",
    ),
    Mutant(
        "of two micro-batches that were fetched the second is counted first",
        "resilient/train/data/streaming.py",
        "self._given.append((taken, state))",
        "self._given.appendleft((taken, state))",
        f"{CUT} -k killed_in_a_stream",
    ),
    Mutant(
        "a fraction of a pass is one of nothing",
        "resilient/train/data/streaming.py",
        "return taken / self.round_samples / self.rounds",
        "return taken / self.round_samples",
        f"{STREAMS} -k every_pass",
    ),
    Mutant(
        "a stream goes on from a place among rows",
        "resilient/train/data/streaming.py",
        '        if "stream" not in state_dict:\n',
        "        if state_dict is None:\n",
        f"{STREAMS} -k does_not_go_on",
    ),
    Mutant(
        "a stream without an end is trained on for ever",
        "resilient/train/data/streaming.py",
        "    if args.max_steps <= 0:\n",
        "    if args.max_steps == 0:\n",
        f"{STREAMS} -k cannot_do",
    ),
    Mutant(
        "each process that loads yields every round",
        "resilient/train/data/streaming.py",
        "            if turn % workers == worker:\n",
        "            if workers > worker:\n",
        f"{STREAMS} -k load_change_nothing",
    ),
    Mutant(
        "a dataset deals itself among the processes, and is then dealt again",
        "resilient/train/data/streaming.py",
        "    torch_worker._worker_info = None  #",
        "    torch_worker._worker_info = info  #",
        f"{STREAMS} -k bits or load_change",
    ),
    Mutant(
        "the last round of a stream leaves ranks without a sample",
        "resilient/train/data/streaming.py",
        "return [samples[place % len(samples)] for place in range(size)]",
        "return samples",
        f"{STREAMS} -k ranks_deal",
    ),
    Mutant(
        "what shall be dropped is trained on",
        "resilient/train/data/streaming.py",
        "        if self.drop_last:\n",
        "        if self.drop_last is None:\n",
        f"{STREAMS} -k dropped_when",
    ),
    Mutant(
        "random numbers of a sample depend on what was read before it",
        "resilient/train/data/streaming.py",
        "                seed_worker((*self._key, self._place))\n",
        "",
        f"{STREAMS} -k numbers_of_training_alone",
    ),
    Mutant(
        "a stream that was put where it was draws as at its beginning",
        "resilient/train/data/streaming.py",
        "            self._place = cursor.samples\n",
        "            self._place = 0\n",
        f"{STREAMS} -k bits",
    ),
    Mutant(
        "every pass over a stream is its first",
        "resilient/train/data/streaming.py",
        "dataset.set_epoch(cursor.epoch)",
        "dataset.set_epoch(0)",
        f"{STREAMS} -k every_pass",
    ),
    Mutant(
        "reading a stream draws from the random numbers of training",
        "resilient/train/data/streaming.py",
        "            RandomState().load_state_dict(random_state)\n",
        "            pass\n",
        f"{STREAMS} -k numbers_of_training_alone",
    ),
    Mutant(
        "a buffer that forgets what it held is believed to know its place",
        "resilient/train/data/streaming.py",
        "type(inner).__name__ == _FORGETFUL or hasattr",
        "hasattr",
        f"{STREAMS} -k bits",
    ),
    Mutant(
        "ranks that hold a layer together count its labels twice",
        "resilient/train/trainer_hooks.py",
        "copies=ranks // self.data_ranks",
        "copies=1",
        f"{CUT} -k however_it_is_cut",
    ),
    Mutant(
        "a loss grows with the ranks that hold a layer together",
        "resilient/train/trainer_hooks.py",
        "            loss = loss * self.data_ranks\n",
        "            loss = loss * self.session.world.size\n",
        f"{CUT} -k however_it_is_cut",
    ),
    Mutant(
        "a step without a label has a loss that is no number",
        "resilient/train/trainer_hooks.py",
        "return batches, count.clamp(min=1)",
        "return batches, count",
        f"{LOSSES} -k all_ignored",
    ),
    Mutant(
        "tokens are counted by each rank that holds a layer",
        "resilient/train/build_run.py",
        "session.device, ranks, copies, tokens_of",
        "session.device, ranks, 1, tokens_of",
        f"{CUT} -k all_agree",
    ),
    Mutant(
        "ranks that hold a layer together train on samples of their own",
        "resilient/train/session.py",
        "World(world.rank // size, max",
        "World(world.rank % max(1, world.size // size), max",
        f"{CUT} -k however_it_is_cut",
    ),
    Mutant(
        "rows of one group stand for those of all",
        "resilient/train/evaluation/gather.py",
        "torch.cat(cut[:: everyone // ranks])",
        "torch.cat(cut[:ranks])",
        f"{CUT} -k all_agree",
    ),
    Mutant(
        "ranks that hold a layer together begin with weights of their own",
        "resilient/strategies/tensor_parallel.py",
        "        broadcast([*model.parameters(), *model.buffers()])\n",
        "",
        f"{CUT} -k however_it_is_cut",
    ),
    Mutant(
        "what a plan names is replicated too",
        "resilient/strategies/tensor_parallel.py",
        "            styles.setdefault(name, Replicated())\n",
        "            styles[name] = Replicated()\n",
        MESHES,
    ),
    Mutant(
        "weights that are tied are cut apart",
        "resilient/strategies/tensor_parallel.py",
        "if uses[id(parameter)] > 1]",
        "if uses[id(parameter)] > 2]",
        MESHES,
    ),
    Mutant(
        "ranks that hold a layer together are counted among replicas",
        "resilient/strategies/parallelism_options.py",
        "max(1, ranks // (tensor * pipeline))",
        "ranks",
        MESHES,
    ),
    Mutant(
        "nothing is compiled though it was asked for",
        "resilient/train/model/transforms.py",
        "    model.compile(backend=backend, mode=args.torch_compile_mode)\n",
        "",
        COMPILED,
    ),
]
