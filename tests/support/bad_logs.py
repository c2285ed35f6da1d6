"""Click logs that are wrong in one way each, with words of the message that refuses them."""

HEADER = "row,click,site,ad,user,price,tags\n"
ROWS = "1,0,a,b,1,1.5,t1\n2,1,a,b,1,1.5,t1\n"
GOOD = (HEADER + ROWS).encode()

BAD_LOGS: dict[str, tuple[bytes, list[str]]] = {
    "missing column": (b"row,click,site,user,price,tags\n1,0,a,1,1,t\n", ["no column 'ad' (", "present"]),
    "label not 0/1": (GOOD + b"3,2,a,b,1,1,t\n", ["row 3", "'2', neither 0 nor 1"]),
    "label missing": (GOOD + b"3,,a,b,1,1,t\n", ["row 3", "'click' is missing"]),
    "one class": (HEADER.encode() + b"1,0,a,b,1,1,t\n" * 41, ["one class only"]),
    "empty": (b"", ["is empty"]),
    "header only": (HEADER.encode(), ["holds no rows"]),
    "ragged, short": (GOOD + b"3,0,a\n", ["row 3 has 3 fields, expected 7"]),
    "ragged, long": (GOOD + b"3,0,a,b,1,1,t,more\n", ["row 3 has 8 fields, expected 7"]),
    "broken UTF-8": (GOOD + b"3,0,\xff\xfe,b,1,1,t\n", ["row 3 is not valid UTF-8"]),
    "broken UTF-8 header": (b"row,cl\xffick\n1,0\n", ["header line can't be read"]),
    "infinity": (GOOD + b"3,0,a,b,1,inf,t\n", ["row 3, field 'price': infinity"]),
    "no number": (GOOD + b"3,0,a,b,1,dear,t\n", ["row 3, field 'price': 'dear' is not a number"]),
    "10 MB cell": (
        GOOD + b"3,0," + b"x" * 10_000_000 + b",b,1,1,t\n",
        ["row 3, column 'site'", "10,000,000 bytes"],
    ),
    "duplicate columns": (
        b"row,click,site,ad,ad,user,price,tags\n1,0,a,b,b,1,1,t\n",
        ["'ad' appears twice"],
    ),
    "open quote": (GOOD + b'3,0,"a,b,1,1,t\n', ["row 3"]),
}
