"""models: what a run trains: the decoder that ships (`decoder`), or a model of one's own (`own_model`).

In: a configuration of the decoder, or a Flax NNX or Linen module or functions, and inputs. Out: the functions of a run,
from its first state to a step and its evaluation.

May import: batches, runtime, weights.models.cache, and what they may; calls, optimizer and precision of train.
"""
