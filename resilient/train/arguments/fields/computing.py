"""How numbers are computed: precision, recomputation, compilation, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient.train.arguments.fields.option import option


@dataclass
class ComputingArguments:
    """Precision, activation checkpointing and compilation."""

    fp16: bool = option(default=False, help="autocast to float16, with loss scaling")
    bf16: bool = option(default=False, help="autocast to bfloat16")
    fp8: bool = option(default=False, help="linear layers multiply in float8 (torchao)")
    fp8_recipe: str = option(
        "tensorwise", "how fp8 is scaled: tensorwise, rowwise, rowwise_with_gw_hp"
    )
    fp16_full_eval: bool = option(default=False, help="evaluate with weights in float16")
    bf16_full_eval: bool = option(default=False, help="evaluate with weights in bfloat16")
    tf32: bool | None = option(None, "allow TF32 in matrix products; None: torch's default")

    activation_checkpointing: bool | None = option(
        None, "compute activations again in the backward pass instead of storing them"
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "use_reentrant, preserve_rng_state, every_n_layers, offload"
    )

    torch_compile: bool = option(default=False, help="compile the model with torch.compile")
    torch_compile_backend: str | None = option(None, "its backend; switches torch_compile on")
    torch_compile_mode: str | None = option(None, "its mode; switches torch_compile on")
    use_liger_kernel: bool = option(default=False, help="fused kernels of liger-kernel")
    liger_kernel_config: dict[str, bool] | None = option(None, "which of its kernels")
    use_cache: bool = option(default=False, help="keep the cache of keys and values in training")

    @property
    def gradient_checkpointing(self) -> bool:
        """The old name of ``activation_checkpointing``."""
        return bool(self.activation_checkpointing)

    @property
    def gradient_checkpointing_kwargs(self) -> Any:
        """The old name of ``activation_checkpointing_kwargs``."""
        return self.activation_checkpointing_kwargs
