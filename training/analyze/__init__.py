"""A network's analysis as a page of pictures: `keras-preact analyze`.

subjects.py opens what is analysed with its images, chapters.py measures and draws,
page.py makes the HTML, __main__.py is the command line.
"""
