"""Defects of optimizers, schedules and steps that a run must not have."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MATRIX = "tests/unit/train/test_matrix.py"
BLOCK = "tests/process/test_deepspeed_schedules.py"
REBUILT = "tests/unit/train/interop/test_rebuilding.py"
FITTING = "tests/unit/train/test_fitting.py"
KEYS = "tests/unit/strategies/test_deepspeed_keys.py"
PRECISION = "tests/unit/train/test_precision.py"
SETTINGS = "tests/unit/train/test_named_settings.py"

MUTANTS = [
    Mutant(
        "a projector in an optimizer's state is made anew at a resume",
        "resilient/state_dict/flatten.py",
        '        vars(made).update(value["fields"])\n',
        '        made.__init__(value["fields"]["rank"], update_proj_gap=3)\n',
        f"{MATRIX} -k galore_adamw",
    ),
    Mutant(
        "the two halves of Muon with AdamW keep their own state at a resume",
        "resilient/train/optimizers/third_party.py",
        "        super().load_state_dict(state_dict)\n        self._share()\n",
        "        super().load_state_dict(state_dict)\n",
        f"{MATRIX} -k muon-",
    ),
    Mutant(
        "a schedule that follows a metric hears of no evaluation",
        "resilient/train/schedules/factory.py",
        "        scheduler.step(metric_of(args, metrics))\n",
        "        pass\n",
        f"{MATRIX} -k moved_by_the_metric",
    ),
    Mutant(
        "a step that ran out of memory keeps the random numbers that it drew",
        "resilient/train/auto_batch_size.py",
        "        RandomState().load_state_dict(self.random)\n",
        "",
        FITTING,
    ),
    Mutant(
        "a step that ran out of memory keeps the losses of its passes",
        "resilient/train/auto_batch_size.py",
        "        run.meters.rewind(self.loss)\n",
        "",
        FITTING,
    ),
    Mutant(
        "a schedule over the arguments' length stays though the run has another",
        "resilient/train/build_run.py",
        "{state.max_steps, run.scheduled_steps}",
        "{state.max_steps}",
        FITTING,
    ),
    Mutant(
        "the schedule of DeepSpeed's config begins one update early",
        "resilient/strategies/deepspeed_config.py",
        "self._factor(step - 1)",
        "self._factor(step)",
        f"{BLOCK} -k rates_equal",
    ),
    Mutant(
        "the decay of DeepSpeed's config counts the warm-up too",
        "resilient/strategies/deepspeed_config.py",
        "max(1.0, self.total - self.steps)",
        "max(1.0, self.total)",
        f"{BLOCK} -k rates_equal",
    ),
    Mutant(
        "a stretched run takes a rate of DeepSpeed's config for a factor",
        "resilient/train/schedules/factory.py",
        "[1.0] * len(rates) if isinstance(new, RateLR) else new.base_lrs",
        "new.base_lrs",
        f"{BLOCK} -k stretched",
    ),
    Mutant(
        "a schedule of one's own beats that of DeepSpeed's config in silence",
        "resilient/train/schedules/factory.py",
        "not isinstance(scheduler, RateLR) and",
        "False and",
        f"{BLOCK} -k ones_own",
    ),
    Mutant(
        "a rebuilt state believes the folder's name against the optimizer",
        "resilient/train/hf_interop/rebuild.py",
        "    if len(set(steps.values())) > 1 and not skips:\n",
        "    if False:\n",
        f"{REBUILT} -k several_steps",
    ),
    Mutant(
        "a rebuilt state has its sibling's place in the data",
        "resilient/train/hf_interop/rebuild.py",
        "        epoch=_epoch_at(step, sibling),\n",
        '        epoch=float(sibling_state["epoch"]),\n',
        f"{REBUILT} -k sibling",
    ),
    Mutant(
        "a file that cannot be read goes into a rebuilt folder",
        "resilient/train/hf_interop/rebuild.py",
        "    skipped = {STATE, UNFINISHED, *(name for names in lost.values() for name in names)}\n",
        "    skipped = {STATE, UNFINISHED}\n",
        f"{REBUILT} -k cannot_be_read",
    ),
    Mutant(
        "a rebuilt checkpoint of ours counts the samples of a step for those of a batch",
        "resilient/train/hf_interop/rebuild.py",
        "state.train_batch_size = each // max(1, ranks)",
        'state.train_batch_size = data["global_batch"]',
        f"{REBUILT} -k goes_on_from_its_step",
    ),
    Mutant(
        "a loss over all tokens is divided by the micro-batches once more",
        "resilient/train/trainer_hooks.py",
        "            is_scaled = bool(counted)\n",
        "            is_scaled = False\n",
        "tests/unit/train/test_losses.py",
    ),
    Mutant(
        "a number takes the place of a learning rate that is a tensor",
        "resilient/train/schedules/factory.py",
        '        group["lr"].fill_(rate)',
        '        group["lr"] = rate',
        "tests/unit/train/test_rates.py",
    ),
    Mutant(
        "a learning rate that is a tensor is logged as one",
        "resilient/train/meters.py",
        "self.learning_rate = float(learning_rate)",
        "self.learning_rate = learning_rate  # type: ignore[assignment]",
        "tests/unit/train/test_rates.py -k what_the_tensor",
    ),
    Mutant(
        "nothing computes in a lower precision",
        "resilient/train/model/precision.py",
        "        return torch.autocast(self._device, self._dtype)\n",
        "        return _NOTHING\n",
        f"{PRECISION} -k layers_compute",
    ),
    Mutant(
        "fp16 has no scaler",
        "resilient/train/model/precision.py",
        "self.scaler = torch.amp.GradScaler(self._device) if args.fp16 else None",
        "self.scaler = None",
        f"{PRECISION} -k scale_is",
    ),
    Mutant(
        "bf16 has a scaler",
        "resilient/train/model/precision.py",
        "torch.amp.GradScaler(self._device) if args.fp16 else None",
        "torch.amp.GradScaler(self._device) if args.fp16 or args.bf16 else None",
        f"{PRECISION} -k only_fp16",
    ),
    Mutant(
        "the schedule follows an update that fp16 left out",
        "resilient/train/model/precision.py",
        "        return self.scaler.get_scale() >= before",
        "        return True",
        f"{PRECISION} -k left_out",
    ),
    Mutant(
        "micro-batches add up to more than their mean",
        "resilient/train/trainer_hooks.py",
        "            loss = loss / self.current_gradient_accumulation_steps\n",
        "            pass\n",
        "tests/unit/train/test_recipes.py -k bare_loop",
    ),
    Mutant(
        "a step is one micro-batch, whatever was asked",
        "resilient/train/trainer.py",
        "        group = min(self.args.gradient_accumulation_steps, run.rounds_left())\n",
        "        group = min(1, run.rounds_left())\n",
        "tests/unit/train/test_recipes.py -k bare_loop",
    ),
    Mutant(
        "the training loss is that of one step more",
        "resilient/train/meters.py",
        "        return summed / count if count else 0.0\n",
        "        return summed / (count + 1) if count else 0.0\n",
        f"{SETTINGS} -k mean_over",
    ),
    Mutant(
        "logs fall on other steps than the field's when nobody says where",
        "resilient/train/state.py",
        "    logging_steps: int = 500\n",
        "    logging_steps: int = 7\n",
        "tests/unit/train/test_state.py",
    ),
    Mutant(
        "tensors of a GPU stay there",
        "resilient/train/hf_interop/readers.py",
        'map_location="cpu", ',
        "",
        "tests/unit/train/interop/test_files_of_accelerators.py",
    ),
    Mutant(
        "samples are fetched in the loop, whatever was asked",
        "resilient/train/data/sampler.py",
        '        "num_workers": args.dataloader_num_workers,\n',
        '        "num_workers": 0,\n',
        f"{SETTINGS} -k processes",
    ),
    Mutant(
        "a run cannot go over to fp16",
        "resilient/train/build_run.py",
        'Part(cast("Stateful", scaler), optional=True)',
        'Part(cast("Stateful", scaler))',
        f"{PRECISION} -k goes_over",
    ),
    Mutant(
        "the scaler of a CPU is exported, at whose file Transformers fails",
        "resilient/train/hf_interop/exporter.py",
        "SCALER if _is_of_gpu(parts) else SCALER_OF_CPU",
        "SCALER",
        "tests/unit/train/interop/test_exporting.py -k fp16",
    ),
    Mutant(
        "a misspelt key of DeepSpeed is passed over",
        "resilient/strategies/deepspeed_config.py",
        ("    unknown = [*find_misspelt_keys(config)]\n"),
        "    unknown: list[str] = []\n",
        KEYS,
    ),
    Mutant(
        "what DeepSpeed refuses of its config comes up raw",
        "resilient/strategies/deepspeed.py",
        "    except invalid as error:\n",
        "    except ZeroDivisionError as error:\n",
        KEYS,
    ),
]
