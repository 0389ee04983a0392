"""What `benchmarks/h200.py` is made of.

`cases.py` is what is measured, as data. `attention.py`, `page_moves.py`, `page_writes.py`,
`packed_weights.py`, `residual_norms.py`, `decode_layers.py` and `limits.py` turn a case into a
problem (`problem.py`): functions and their arguments, which are arrays on a device or only shapes.
`measure.py` times problems and compares them with what is exact (`errors.py`); `describe.py`
compiles the same ones for an H200. `peers_jax.py` and `peers_torch.py` solve them
otherwise. `machine.py` has what is not of that form, `classes.py` what `verified.json` is to know.
`parts.py` puts all this in order, `records.py` keeps what was found, and `report.py` prints it.
"""
