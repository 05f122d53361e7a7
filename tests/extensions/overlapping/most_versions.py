"""How many versions of its weights each stage has."""

from __future__ import annotations

import pytest

import fxpipe
from fxpipe.extensions.overlapping.stage_weights import Buffers, StageWeights


class MostVersions:
    """Counts, from when it is made, how many versions of its weights each stage has at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._most: dict[StageWeights, int] = {}
        append = StageWeights._append

        def counted(stage: StageWeights, tensors: Buffers) -> None:
            append(stage, tensors)
            alive = len(stage.live)
            self._most[stage] = max(self._most.get(stage, 0), alive)

        patch.setattr(StageWeights, "_append", counted)

    def of(self, pipe: fxpipe.Pipeline) -> list[int]:
        versions = pipe._engine.progress.versions
        assert versions is not None
        return [self._most[stage] for stage in versions.stages]
