"""What serving costs, side by side in one run: `keras-preact benchmark serving`.

exports.py writes the networks, loop.py runs one of them in a process of its own,
servers.py starts the real server and builds requests, client.py sends them, parts.py
measures all that in turn, results.py turns the figures into a table and says which
demands they meet, measure.py puts these together.
"""
