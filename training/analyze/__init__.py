"""A network's analysis as a page of pictures: `python -m training.analyze TARGET [--option value ...]`.

subjects.py opens what is analysed with its images, chapters.py measures and draws, page.py makes the HTML, __main__.py is the
command line.
"""
