"""What the simulated engines can do, and where each number is from.

A pod is one H200 with a model of Qwen3-32B's shape in bfloat16. docs/benchmarks/connector-gpu.md has what was measured of it. Its prefill speed is
that of llm-d's calibration of the same model (15,928 tokens/s on two H100, 7,964 each), so that the peers' own figure fits too.
"""

from dataclasses import dataclass

from bench.local_prefill.mixes import LARGE

_KV_BYTES_PER_TOKEN = 4295e6 / 16384
"""connector-gpu.md, "WRITE against READ": the KV of a first prompt of 16,384 tokens."""
_MEMORY_BYTES_PER_SECOND = 4.8e12
"""NVIDIA's data sheet of the H200."""
_KV_BYTES = 141e9 * 0.9 - 65.5e9 - 3e9
"""The H200's memory at vLLM's default of 0.9, less 32.8e9 weights of two bytes and some room for activations."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Times in seconds, KV in tokens."""

    kv_tokens: int = int(_KV_BYTES / _KV_BYTES_PER_TOKEN)
    offloaded_tokens: int = int(200e9 / _KV_BYTES_PER_TOKEN)
    """What prefill keeps in the host's memory beside that: 200 GB a GPU (vLLM's --kv-offloading-size), of the 2 TiB of a P5en with eight."""
    sequences: int = 256
    """vLLM's default of --max-num-seqs."""
    budget: int = LARGE.budget
    """Prompt tokens that one step of prefill computes at most."""
    prefill_step: float = LARGE.step
    per_token: float = LARGE.per_token
    """Of a prompt, on prefill: 32,768 in 4.18 s."""
    front: float = LARGE.front
    """What a turn takes before an engine sees it, and between the two engines, beside steps and transfer."""
    hand_over: float = LARGE.hand_over
    remote_cost: float = 0.17
    """Of a token that is moved, as a share of a computed one's: the slope of transfer time over that of prefill in AWS's published curves for
    this model on P5en (EFA). Over NVLink 0.006 was measured. Here it is time that the turn waits, and time that prefill cannot compute."""
    decode_step: float = 0.0186
    """20.64 ms a token were measured with CUDA graphs and two sequences of 16,000 tokens; less the two terms below."""
    per_sequence: float = 1e-4
    """bench.local_prefill's; not measured."""
    per_kv_token: float = _KV_BYTES_PER_TOKEN / _MEMORY_BYTES_PER_SECOND
    """Each step reads the KV of all that runs."""
    write_back: float = 0.024
    """connector-gpu.md: the median of a write-back, turn's end to prefix cache."""
    start: float = 90.0
    """From a new pod to ready: 60 to 86 s were measured with weights that need no loading."""
    drain: float = 120.0
    """drain.timeoutSeconds: a pod that is to go is waited for so long."""

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens that prefill computes in full steps: what a calibration with chunks of `budget` tokens measures."""
        return self.budget / (self.prefill_step + self.budget * self.per_token)

    def token_seconds(self, sequences: float, kv_tokens: float) -> float:
        """A step of decode: the time between two tokens of each answer."""
        return self.decode_step + self.per_sequence * sequences + self.per_kv_token * kv_tokens


H200 = Engine()
TTFT_SLO = 4.0
"""Seconds. Three times what an idle engine takes for a first prompt of 8,000 tokens."""
