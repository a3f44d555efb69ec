"""How much of a GPU a run may take, and the bytes of a number: one table for runs, plan and preflight."""

# Bytes of a number in each type.
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes of a 4-bit value (nf4 with double quantization): two per byte, a one-byte scale per 64, an fp32 scale per 256
# scales.
BYTES_PACKED = 0.5 + 1 / 64 + 4 / (64 * 256)
# Share of a GPU that an estimate may fill; the rest is for the driver, NCCL and what is not counted.
FILLED = 0.9
# Share that stays free beside a measured pass, for NCCL's buffers and fragmentation.
HEADROOM = 0.08
# The same with sharding, where weights and gradients are estimated, within 10 % of measured runs (docs/plan.md).
SHARDED_HEADROOM = 0.18
