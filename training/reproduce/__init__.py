"""The paper's tables, measured: `python -m training.reproduce table2`, each published number beside ours."""
