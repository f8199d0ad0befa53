"""Alert rules, dashboard and the tables of docs/operating.md, generated from the metrics that the services declare.

`python -m monitoring` writes them; a test reports which are out of date.
"""
