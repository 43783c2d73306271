"""A network's analysis as a page of pictures: `keras-preact analyze`.

specimen.py opens the network and its images, chapters.py measures and draws, page.py
fills page.html with the texts of pictures.toml, __main__.py is the command line.
"""
