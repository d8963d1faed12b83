"""What the compiler must leave alone: it does not know gradients by rows.

A file of its own, imported only while a model is compiled: `torch.compiler.disable` loads the compiler, which takes a second
and 70 MB that nobody else should pay.
"""

import torch

from rarebit.tables.collection import gather_eagerly

gather_uncompiled = torch.compiler.disable(gather_eagerly)
