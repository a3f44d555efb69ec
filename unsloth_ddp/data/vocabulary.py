"""State for which tokens a model has weights, for the checks of rows. Pure values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model has weights for.

    Args:
        model: the name of the model, or of the reference if it has fewer rows.
        rows: rows of the token embedding, or of the output head if it has fewer; token ids are below.
        untrained: added tokens whose rows hold what a resize of the embedding writes, and that the run does not train.
        trained: tokens that the run trains by name.
    """

    model: str
    rows: int
    untrained: frozenset[int] = frozenset()
    trained: frozenset[str] = frozenset()

    def refusal(self, token: str, number: int) -> str:
        """Return why a row with a token beyond the last one is refused."""
        return (
            f"the row has the token {token} ({number}), and {self.model} has weights for the tokens 0 to "
            f"{self.rows - 1} only; use the tokenizer that belongs to the model, or add the token to a copy of the "
            "model (docs/rows.md, New tokens)."
        )
