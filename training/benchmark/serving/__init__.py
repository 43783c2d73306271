"""The cost of serving, side by side in one run: `keras-preact benchmark serving`.

One module per question: direct.py, over_http.py, memory.py. exports.py writes the
networks, client.py sends requests, verdict.py turns the figures into tables and holds
them to the demands, suite.py has the options and runs everything.
"""
