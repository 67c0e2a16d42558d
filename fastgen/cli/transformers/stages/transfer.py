"""Copies between the host and a GPU beside what the GPU computes: from and to pinned memory, on a stream of their own.

On a CPU there is nothing to copy. Not yet run on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch


class Transfer:
    """`device` and the stream of its copies.

    `send` is called by the thread that plans batches, the rest by the one that runs the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        """The tensors on the device, and what has to happen before they may be read.

        Tensors stay where they are, and nothing has to happen, if the model's memory leaves no room for the next batch.
        """
        if self._stream is None:
            return inputs, None
        try:
            with torch.cuda.stream(self._stream):
                sent = {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in inputs.items()}
                return sent, self._stream.record_event()
        except torch.cuda.OutOfMemoryError:
            return inputs, None

    def receive(self, inputs: dict[str, torch.Tensor], sent: torch.cuda.Event | None) -> dict[str, torch.Tensor]:
        """The tensors for the stream of the model, which waits for the copies; this thread does not."""
        if sent is None:
            return {name: tensor.to(self.device) for name, tensor in inputs.items()}
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(sent)
        for tensor in inputs.values():
            tensor.record_stream(stream)  # its memory is not to be given away while the model reads it
        return inputs

    def device_works_sync(self) -> bool:
        """After some errors, such as an index out of range in a kernel, a GPU answers everything with that error."""
        try:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def fetch_sync(self, tensor: torch.Tensor) -> np.ndarray:
        """The values of a tensor that the model's stream computes; waits for them and for nothing after them."""
        if self._stream is None:
            return tensor.cpu().numpy()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host.numpy()
