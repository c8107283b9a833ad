"""The fields of TrainingArguments, one base dataclass per group."""
