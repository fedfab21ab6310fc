"""How results are drawn: a module a benchmark, on a matplotlib Figure that `kvhoist.bench.plot` makes and saves."""
