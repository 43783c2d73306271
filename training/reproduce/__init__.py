"""The paper's tables, measured: `keras-preact reproduce table2`, each published number
beside ours.
"""
