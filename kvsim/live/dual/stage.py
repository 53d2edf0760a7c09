"""Prompts on their way into a pool: at once where its size is given, else when all of them are known."""

from kvsim.live.dual.pool import Compact, Pool

__all__ = ["Stage"]


class Stage:
    """Takes the prompts of a batch, layer by layer, and makes their pool.

    Parameters
    ----------
    window : int
        W.
    batch : int
        Sequences.
    steps : int
        The most steps that will be decoded.
    length : int
        Positions of the longest prompt.
    pages : int, optional
        Pages of the pool, which is filled as layers come. By default prompts wait, cut down, until the last one has
        come, and there are as many pages as they and the steps can need.
    layers : int, optional
        With `pages`: eligible layers.
    """

    def __init__(
        self,
        window: int,
        batch: int,
        *,
        steps: int,
        length: int,
        pages: int | None = None,
        layers: int | None = None,
    ) -> None:
        # What never leaves a window needs no larger ring than all positions there will be.
        self.window, self.batch, self.steps, self.pages = min(window, length + steps), batch, steps, pages
        self._layers, self._length = layers, length
        self._waiting: list[tuple[int, int, Compact]] = []
        self._pool: Pool | None = None

    def take(self, layer: int, row: int, prompt: Compact) -> None:
        """Take one layer of a sequence's prompt."""
        if self._pool is None and self.pages is not None and self._layers is not None:
            self._pool = self._made(self.pages, self._layers, self._length, prompt)
        if self._pool is None:
            self._waiting.append((layer, row, prompt))
        else:
            self._pool.fill(layer, row * len(prompt.counts), prompt)

    def pool(self) -> Pool:
        """Give the pool, when everything has been taken."""
        if self._pool is None:
            pages = self.pages
            if pages is None:
                pages = sum(prompt.pages(self.window, self.steps) for _, _, prompt in self._waiting)
            layers = 1 + max(layer for layer, _, _ in self._waiting)
            self._pool = self._made(pages, layers, self._length, self._waiting[0][2])
            # What has been put away is let go.
            while self._waiting:
                layer, row, prompt = self._waiting.pop()
                self._pool.fill(layer, row * len(prompt.counts), prompt)
        return self._pool

    def _made(self, pages: int, layers: int, length: int, prompt: Compact) -> Pool:
        return Pool(
            layers,
            self.batch * len(prompt.counts),
            window=self.window,
            most_global=max(0, length - self.window) + self.steps,
            steps=self.steps,
            pages=pages,
            dim=prompt.keys.shape[-1],
            dtype=prompt.keys.dtype,
            device=prompt.keys.device,
        )
