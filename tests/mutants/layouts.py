"""Defects of what FSDP and tensor parallelism are told, and of taking over sharded runs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPTIONS = "tests/unit/strategies/test_fsdp_options.py"
UNITS = "tests/unit/strategies/test_fsdp_units.py"
DETOUR = "tests/unit/strategies/test_detour.py"
MESHES = "tests/unit/strategies/test_meshes.py"
GROUPS = "tests/unit/state_dict/test_optimizer.py tests/unit/train/test_schedule_groups.py"
FOLDERS = "tests/unit/train/interop/test_sharded_folders.py"
STRATEGIES = "tests/process/test_strategies.py --kinds="
FLAT = f"{STRATEGIES}ddp,flat,flat_grad_op"
FLAT_TOLD = f"{FLAT} -k fsdp1_is_told"
FLAT_TRAINS = f"{FLAT} -k replicas_train"
FP16 = f"{STRATEGIES}flat_fp16 -k overflow"
TP_FP16 = f"{STRATEGIES}tp_fp16 -k overflow"
TP = f"{STRATEGIES}ddp,tp_ddp -k tp_ddp"
WAITS = "tests/process/test_groups_wait.py"
FSDP1 = "resilient/strategies/fsdp1.py"
DCP = "resilient/train/hf_interop/readers.py"
ZERO = "resilient/train/hf_interop/readers.py"
PARTS = "resilient/train/hf_interop/conversion.py"

MUTANTS = [
    Mutant(
        "what FSDP1 does is refused as FSDP2 does not",
        "resilient/strategies/fsdp_options.py",
        "    if options.version == 1:\n",
        "    if False:\n",
        OPTIONS,
    ),
    Mutant(
        "one name of a dtype leaves buffers of FSDP1 as they are",
        "resilient/strategies/fsdp_options.py",
        '    if values.pop("one_dtype", False) and values.get("version") == 1:\n',
        '    if values.pop("one_dtype", False) and False:\n',
        OPTIONS,
    ),
    Mutant(
        "FSDP2 is told what it does not do, and nobody hears of it",
        "resilient/strategies/fsdp_options.py",
        "    if not options.limit_all_gathers:\n",
        "    if False:\n",
        OPTIONS,
    ),
    Mutant(
        "an optimizer over whole tensors is given flat shards",
        "resilient/train/arguments/derived.py",
        "            args.optim not in BY_ELEMENT,\n",
        "            False,\n",
        OPTIONS,
    ),
    Mutant(
        "a list of modules is gathered when it is called, which it never is",
        "resilient/strategies/fsdp.py",
        "        by_size = by_size and not isinstance(module, nn.ModuleList | nn.ModuleDict)\n",
        "",
        UNITS,
    ),
    Mutant(
        "a model in flat shards is called without its wrapper",
        "resilient/strategies/module_wrapper.py",
        "        call = self._compute if self._is_inside else self.wrapper\n",
        "        call = self._compute\n",
        DETOUR,
    ),
    Mutant(
        "after an error calls go past the wrapper",
        "resilient/strategies/module_wrapper.py",
        "self._leave, always_call=True)",
        "self._leave)",
        DETOUR,
    ),
    Mutant(
        "groups that were told different things are taken for one",
        "resilient/state_dict/optimizer.py",
        " or not all(is_same(option, options[0]) for option in options)",
        "",
        GROUPS,
    ),
    Mutant(
        "rates of groups that differed are taken for one",
        "resilient/train/schedules/factory.py",
        "    if any(value != values[0] for value in values):\n",
        "    if False:\n",
        GROUPS,
    ),
    Mutant(
        "flat shards are cut from what each rank drew for itself",
        FSDP1,
        "        broadcast([*model.parameters(), *model.buffers()])\n",
        "",
        FLAT_TRAINS,
    ),
    Mutant(
        "a norm over flat shards is that of this rank alone",
        FSDP1,
        "        dist.all_reduce(squares, group=self._group)\n",
        "",
        FLAT_TRAINS,
    ),
    Mutant(
        "gradients of flat shards are reduced after each micro-batch",
        FSDP1,
        "        with wrapper.no_sync():\n            yield\n",
        "        yield\n",
        f"{FLAT} -k sent_once",
    ),
    Mutant(
        "an overflow is that of one rank alone",
        FSDP1,
        "            plain.scaler = _Scaler(self._device.type)\n",
        "            pass\n",
        FP16,
    ),
    *(
        Mutant(f"FSDP1 is not told `{name}`", FSDP1, text, "", FLAT_TOLD)
        for name, text in (
            ("forward_prefetch", "                forward_prefetch=options.forward_prefetch,\n"),
            (
                "backward_prefetch",
                "                backward_prefetch=_PREFETCH[options.backward_prefetch],\n",
            ),
            ("use_orig_params", "                use_orig_params=options.use_orig_params,\n"),
            ("limit_all_gathers", "                limit_all_gathers=options.limit_all_gathers,\n"),
            (
                "auto_wrap_policy",
                (
                    "                "
                    "auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),\n"
                ),
            ),
        )
    ),
    Mutant(
        "a mesh has other ranks than there are",
        "resilient/strategies/parallelism_options.py",
        "    if tensor * pipeline * replicate * shard != ranks:\n",
        "    if False:\n",
        MESHES,
    ),
    Mutant(
        "a tied parameter is cut apart",
        "resilient/strategies/tensor_parallel.py",
        "    if tied:\n",
        "    if False:\n",
        MESHES,
    ),
    Mutant(
        "layers are cut from what each rank drew for itself",
        "resilient/strategies/tensor_parallel.py",
        "        broadcast([*model.parameters(), *model.buffers()])\n",
        "",
        TP,
    ),
    Mutant(
        "groups of tensor parallel ranks are not joined",
        "resilient/strategies/tensor_parallel.py",
        "            self._over_groups().shard(model, mesh[sizes.names[:-1]])\n",
        "            pass\n",
        TP,
    ),
    Mutant(
        "groups of a mesh wait as long as torch likes",
        "resilient/strategies/base.py",
        "    for group in mesh.get_all_groups():\n",
        "    for group in ():\n",
        WAITS,
    ),
    Mutant(
        "groups of a pipeline wait as long as torch likes",
        "resilient/strategies/base.py",
        ("grouped(groups, timeout=group_timeout())"),
        "grouped(groups)",
        WAITS,
    ),
    Mutant(
        "a folder is imported that the judge calls not resumable",
        "resilient/diff/verification.py",
        '    if verdict.answer == "no":\n',
        "    if False:\n",
        "tests/unit/train/interop/test_taking_over.py",
    ),
    Mutant(
        "NaN in a buffer is taken for NaN in a parameter",
        "resilient/diff/foreign_verify.py",
        "        is_fatal = bool(counts.nans) and not (tensor.part == MODEL and is_buffer)\n",
        "        is_fatal = bool(counts.nans)\n",
        "tests/process/test_lightning_judge.py -k resumes_exactly",
    ),
    Mutant(
        "the state of an optimizer is taken for a schedule",
        "resilient/layouts/training_state.py",
        "if not isinstance(value, dict) or optimizer_of(value, None) is not None:",
        "if not isinstance(value, dict):",
        "tests/process/test_lightning_judge.py -k schedule_state",
    ),
    Mutant(
        "the agent starts workers for a folder that they refuse",
        "resilient/elastic/launcher.py",
        "            _check_resume(options, emit)\n",
        "            pass\n",
        "tests/unit/elastic/test_resume_check.py -k agent_refuses",
    ),
    Mutant(
        "the agent refuses the folder of a job that has saved",
        "resilient/elastic/resume_check.py",
        "if wish in (AUTO, NEVER) or _may_continue(start):",
        "if wish in (AUTO, NEVER):",
        "tests/unit/elastic/test_resume_check.py -k continued_job",
    ),
    Mutant(
        "checksums in torch's files are not looked at",
        "resilient/train/hf_interop/readers.py",
        "            spoiled = content.testzip()\n",
        "            spoiled = None\n",
        FOLDERS,
    ),
    Mutant(
        "a tensor with holes is taken for whole",
        DCP,
        ("        is_whole = len(regions) == len(slices) and covers(tensor.shape, regions)\n"),
        "        is_whole = True\n",
        FOLDERS,
    ),
    Mutant(
        "an index leads out of its folder",
        "resilient/train/hf_interop/source_folder.py",
        "        if name not in self.listing.sizes:\n",
        "        if False:\n",
        "tests/unit/train/interop/test_source_folder.py",
    ),
    Mutant(
        "the optimizer of another model is taken",
        PARTS,
        "    if held != trained:\n",
        "    if False:\n",
        FOLDERS,
    ),
    Mutant(
        "an empty group of an optimizer is taken for one",
        PARTS,
        ': nth for nth, group in enumerate(groups) if group["params"]\n',
        ": nth for nth, group in enumerate(groups)\n",
        FOLDERS,
    ),
    Mutant(
        "a schedule keeps what it has of groups in the order of others",
        PARTS,
        "[places[members] for members in own] if set(own) == set(places) else list",
        "list",
        FOLDERS,
    ),
    Mutant(
        "a tied tensor is known by one name only",
        PARTS,
        "    state = {ours.get(name, name): dict(value) for name",
        "    state = {name: dict(value) for name",
        FOLDERS,
    ),
    Mutant(
        "a rank's share of a parameter is rounded down",
        ZERO,
        "            width = count if whole is not None else math.ceil(count / len(line))\n",
        "            width = count if whole is not None else count // len(line)\n",
        FOLDERS,
    ),
    Mutant(
        "padding of partitions is taken for numbers",
        ZERO,
        "            found[name] = flat[:count].reshape(shape).clone()\n",
        "            found[name] = flat[-count:].reshape(shape).clone()\n",
        FOLDERS,
    ),
    Mutant(
        "a missing partition is not missed",
        ZERO,
        "        if self.stage and len(files) != ranks:\n",
        "        if False:\n",
        FOLDERS,
    ),
    Mutant(
        "an engine of another step is taken",
        ZERO,
        "        if step is not None and made != step:\n",
        "        if False:\n",
        FOLDERS,
    ),
    Mutant(
        "partitions in another order are read in this one",
        ZERO,
        "            if self._config.get(name):\n",
        "            if False:\n",
        FOLDERS,
    ),
    Mutant(
        "ranks that hold layers together look for overflows as torch does",
        "resilient/strategies/tensor_parallel.py",
        "        scale_jointly(updates, self.device)\n",
        "",
        TP_FP16,
    ),
    Mutant(
        "an overflow in a shard is known to its rank alone",
        "resilient/strategies/base.py",
        "        dist.all_reduce(worst, op=dist.ReduceOp.MAX)\n",
        "",
        TP_FP16,
    ),
    Mutant(
        "what all ranks found is forgotten",
        "resilient/strategies/base.py",
        "            value.copy_(worst)\n",
        "            pass\n",
        TP_FP16,
    ),
    Mutant(
        "DDP adds gradients up over ranks in every pass",
        "resilient/strategies/ddp.py",
        "        if self.sync_each_batch:\n",
        "        if True:\n",
        "tests/process/test_ddp.py -k averaged",
    ),
]
