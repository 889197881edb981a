"""Gives every test a CPU with eight devices and a compiler in a hurry; must run before jax is imported."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tests run tiny models for a moment, and spend their time compiling.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()
