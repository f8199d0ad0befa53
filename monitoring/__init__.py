"""Alert rules, dashboard and the tables of docs/operating.md, made of the metrics that the services declare.

`python -m monitoring` writes them; `python -m monitoring --check` says which are not up to date.
"""
