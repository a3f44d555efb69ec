"""The counts of one model with one adapter that memory and time are estimated from."""

import dataclasses
from dataclasses import dataclass

from unsloth_ddp.data.order.packing import PackingObstacles


@dataclass(frozen=True)
class ModelShape:
    """Counts of one model with one adapter.

    parameters       of the base model; tied ones count once
    linear           of those, in linear layers except the output head: quantized by QLoRA and adapted by all-linear
    largest_linear   of the largest linear layer
    head             of the output head, tied to the embedding or not
    vocabulary       rows of the head
    adapter          parameters that LoRA and QLoRA train, modules_to_save included
    layers           blocks that gradient checkpointing recomputes
    layer_input      bytes per token of a block's input, in 16 bit
    layer_kept       bytes per token that a block keeps for its backward pass, in 16 bit, without attention scores
    outside_kept     bytes per token kept outside the blocks
    experts          parameters of experts that are stacked in one tensor, which is not a linear layer: Unsloth's QLoRA
                     packs them, Transformers' does not
    active_experts   of those, the ones that a token is multiplied with; all where the config does not say how many
    adapted_experts  of those, the ones that the adapter changes
    has_experts      the model is a mixture of experts
    towers           parameters beside the text decoder that full training freezes
    tower_linear     of those, in linear layers
    numbers_a_patch  numbers of an image that a patch of the tower has; 0 without a tower of images
    tower_layers     layers of the tower
    tower_input      bytes of a patch at the input of such a layer, in 16 bit
    tower_kept       bytes of a patch that such a layer keeps for its backward pass, in 16 bit; about
    tower_trained    weights of these layers, or adapters on them, are trained
    tokens_a_pixel   work of the tower for a number of an image, in tokens (model/towers.py)
    packing          what in the model is against packed rows
    """

    parameters: int
    linear: int
    largest_linear: int
    head: int
    vocabulary: int
    adapter: int
    layers: int
    layer_input: float
    layer_kept: float
    outside_kept: float
    experts: int = 0
    active_experts: int = 0
    adapted_experts: int = 0
    has_experts: bool = False
    towers: int = 0
    tower_linear: int = 0
    numbers_a_patch: int = 0
    tower_layers: int = 0
    tower_input: int = 0
    tower_kept: int = 0
    tower_trained: bool = False
    tokens_a_pixel: float = 0.0
    packing: PackingObstacles = dataclasses.field(default_factory=PackingObstacles)

    def trained(self, method: str) -> int:
        """Return the number of parameters that a method trains."""
        return self.parameters - self.towers if method == "full" else self.adapter

    def flops_a_token(self, method: str) -> float:
        """Return the model FLOP per token: 2 n forward, 2 n for input gradients, 2 for each trained weight.

        n counts the weights that a token is multiplied with: of a mixture, the experts that it is routed to. Attention
        scores are left out. So is recomputation, which is work of the hardware, not of the model.
        """
        n = self._multiplied(method)
        trained = n if method == "full" else n - self._multiplied("full")
        return 4 * n + 2 * trained

    def _multiplied(self, method: str) -> float:
        """Return the number of weights that a token is multiplied with."""
        base = self.linear - self.tower_linear + self.active_experts + self.head
        # Of an adapter on experts all counts: PEFT adds it to every expert's weights, whatever the tokens.
        return base if method == "full" else base + self.adapter
