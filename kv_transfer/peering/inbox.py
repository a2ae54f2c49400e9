"""Messages that nobody has taken yet, and the losses of peers behind them."""

from __future__ import annotations

from kv_transfer.transport import PeerLost, Received


class Inbox:
    """Says when it is full; who puts has to look. A loss is told after what the peer had said."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.news = False  # whoever takes from here should look
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[Received] = []
        self._num_bytes = 0
        self._num_taken = 0
        self._losses: dict[str, tuple[int, PeerLost]] = {}  # messages put before, the loss

    @property
    def full(self) -> bool:
        return len(self._messages) >= self._max_messages or self._num_bytes >= self._max_bytes

    def put(self, message: Received) -> None:
        self._messages.append(message)
        self._num_bytes += len(message.data)
        self.news = True

    def put_loss(self, loss: PeerLost) -> None:
        """The last one of each peer is kept."""
        self._losses[loss.peer] = (self._num_taken + len(self._messages), loss)
        self.news = True

    def take(self) -> list[Received]:
        taken, self._messages, self._num_bytes = self._messages, [], 0
        self._num_taken += len(taken)
        self.news = self.news or bool(self._due_losses)  # which had to wait for this
        return taken

    @property
    def _due_losses(self) -> list[PeerLost]:
        """Those whose peers have said nothing that is not taken."""
        return [loss for behind, loss in self._losses.values() if behind <= self._num_taken]

    def take_losses(self) -> list[PeerLost]:
        due = self._due_losses
        for loss in due:
            del self._losses[loss.peer]
        return due

    def take_news(self) -> bool:
        """Whether there were any since the last call."""
        told, self.news = self.news, False
        return told
