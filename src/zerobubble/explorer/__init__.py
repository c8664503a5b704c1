"""`zerobubble explore`: a page in the browser that asks the package's own functions and shows their answers while values change.

`question` reads and bounds what the page asks, `answer` plays it, `forms` writes it in every form, `app` serves it on loopback.
`web/` is the page; it draws with the viewer's modules.
"""
