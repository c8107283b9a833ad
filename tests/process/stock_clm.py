"""Language modeling in the style of Transformers' example `run_clm.py`, with no line of ours.

stock_clm.py --output_dir OUT --do_train --do_eval ...
"""

# ruff: noqa: I001, PLR0915, PTH100, PTH112, PTH208 - as such scripts are written

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """Arguments of the model."""

    hidden_size: int = field(default=16, metadata={"help": "Width, 100%% of it trained."})
    torch_dtype: str | None = field(
        default=None, metadata={"help": "Dtype.", "choices": ["auto", "float32"]}
    )


@dataclass
class DataTrainingArguments:
    """Arguments of the data."""

    block_size: int | None = field(default=16, metadata={"help": "Tokens of a sample."})
    keep_linebreaks: bool = field(default=True, metadata={"help": "Keep line breaks."})


def parsed():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def last_checkpoint_of(args):
    last_checkpoint = None
    if os.path.isdir(args.output_dir) and args.do_train:
        last_checkpoint = get_last_checkpoint(args.output_dir)
        if last_checkpoint is None and len(os.listdir(args.output_dir)) > 0:
            raise ValueError(f"Output directory ({args.output_dir}) is not empty.")
    return last_checkpoint


def samples_of(args, block_size):
    text = b"the quick brown fox jumps over the lazy dog " * 60
    raw = Dataset.from_dict({"text": [text.decode()]})

    def grouped(batch):
        tokens = [token for text in batch["text"] for token in text.encode()]
        length = len(tokens) // block_size * block_size
        blocks = [tokens[at : at + block_size] for at in range(0, length, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    with args.main_process_first(desc="grouping texts together"):
        return raw.map(grouped, batched=True, remove_columns=["text"])


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}


def preprocess_logits_for_metrics(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def main():
    model_args, data_args, training_args = parsed()
    sys.stdout.write(
        f"device: {training_args.device}, n_gpu: {training_args.n_gpu}, distributed training: "
        f"{training_args.parallel_mode.value == 'distributed'}, "
        f"scheduler: {training_args.lr_scheduler_type}\n"
    )
    last_checkpoint = last_checkpoint_of(training_args)
    set_seed(training_args.seed)
    torch.set_num_threads(1)
    samples = samples_of(training_args, data_args.block_size)
    config = GPT2Config(
        vocab_size=256,
        n_positions=data_args.block_size,
        n_embd=model_args.hidden_size,
        n_layer=1,
        n_head=2,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=samples.select(range(130)) if training_args.do_train else None,
        eval_dataset=samples.select(range(130, 160)) if training_args.do_eval else None,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = 130
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    kwargs = {"finetuned_from": None, "tasks": "text-generation"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)
    state = trainer.model.state_dict().values()
    bits = b"".join(one.detach().numpy().tobytes() for one in state)
    losses = [(one["step"], one["loss"]) for one in trainer.state.log_history if "loss" in one]
    said = {"bits": hashlib.sha256(bits).hexdigest(), "losses": losses}
    sys.stdout.write(f"end: {json.dumps(said | {'perplexity': metrics['perplexity']})}\n")


if __name__ == "__main__":
    main()
