"""What each format yields of a small file that holds the markup met in packages."""

from __future__ import annotations

import gzip
import struct
import zlib

import pytest

from loopformers.data.package_formats import FORMATS
from loopformers.errors import DataError


def read(kind, file, content):
    data = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(gzip.compress(data) if file.suffix in (".gz", ".dz") else data)
    return list(FORMATS[kind](file))


def test_html_keeps_paragraphs_and_code_and_drops_navigation(tmp_path):
    page = """<html><head><title>T</title><style>p {}</style></head><body>
      <div class="related" role="navigation"><ul><li>index</li></ul></div>
      <h1>Of whales<a class="headerlink" href="#x">\xb6</a></h1>
      <p>The <b>whale</b> is\n   a &lt;fish&gt;.<br>So they say.
      <p>An unclosed paragraph.
      <ul><li>first</li><li>second</li></ul>
      <pre>def f():\n    return  1</pre>
      <table><tr><td>a</td><td>b</td></tr></table>
      <script>var x = 1;</script><footer>Copyright</footer></body></html>"""
    [(name, text)] = read("html", tmp_path / "a.html.gz", page)
    assert name == ""
    assert text == (
        "Of whales\n\nThe whale is a <fish>.\nSo they say.\n\nAn unclosed paragraph.\n\nfirst\n\nsecond\n\n"
        "def f():\n    return  1\n\na b"
    )


def test_html_with_stray_end_tags_is_read_to_its_end(tmp_path):
    assert read("html", tmp_path / "a.html", "<p>one</div></p></span><nav><b>menu</nav><p>two") == [("", "one\n\ntwo")]


def test_pod_resolves_its_codes_and_leaves_code_out(tmp_path):
    pod = """#!/usr/bin/perl
my $x;

=head1 NAME

B<perlop> - I<operators>X<index>, see L<perlfunc/"sort"> or L<the manual|perlsyn>,
with C<< $a <=> $b >> and E<lt>E<eacute>E<gt>

=over 4

=item * first

Text of B<I<both>>.

=back

    verbatim  $x;

=begin html

<p>hidden</p>

=end html

=cut

my $y;

=pod

Again."""
    [(_, text)] = read("pod", tmp_path / "a.pod", pod)
    assert text == (
        "NAME\n\nperlop - operators, see perlfunc in sort or the manual, with $a <=> $b and <é>\n\nfirst\n\nText of both.\n\n"
        "    verbatim  $x;\n\nAgain."
    )


def test_rest_keeps_the_bodies_of_what_is_printed(tmp_path):
    rest = """.. SPDX-License-Identifier: GPL-2.0
.. _label:

=====
Title
=====

.. toctree::
   :maxdepth: 1

   other

Some *emphasis*, **strength**, ``code`` and :c:func:`kmalloc() <kmalloc>`, a `link <http://x.y>`_ and a note [1]_::

    indented(code)

.. note:: Mind this.
   And this.

.. code-block:: c
   :linenos:

   int x;

.. [1] The footnote.

End of |version|."""
    [(_, text)] = read("rest", tmp_path / "a.rst.gz", rest)
    assert text.split("\n\n") == [
        "Title",
        "Some emphasis, strength, code and kmalloc(), a link and a note:",
        "    indented(code)",
        "Mind this.\n   And this.",
        "   int x;",
        "End of version.",
    ]


def test_man_drops_macros_and_escapes(tmp_path):
    man = r""".\" a comment
.de Sp
.if t .sp .5v
..
.TH Wrap 3
.SH "NAME"
Text::Wrap \- line \fBwrapping\fR
.PP
Use \f(CW\*(C`wrap()\*(C'\fR and \s-1ASCII\s0 \(aqquotes\(aq, a back\eslash.
.IP "first item" 4
.B bold words
"""
    [(_, text)] = read("man", tmp_path / "a.3.gz", man)
    assert text.split("\n\n") == [
        "NAME",
        "Text::Wrap - line wrapping",
        "Use wrap() and ASCII 'quotes', a back\\slash.",
        "first item\nbold words",
    ]


DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def dict_digits(number):
    return (dict_digits(number // 64) if number >= 64 else "") + DIGITS[number % 64]


def test_a_dictionary_yields_each_definition_once(tmp_path):
    entries = {
        "00-database-info": "made by hand\n",
        "whale": "whale \\Whale\\, n.\n   A {mammal} of the sea.\n",
        "cetacean": "cetacean\n   A {mammal} of the sea.\n",
        "öl": "öl\n   oil, " + "x" * 70 + "\n",
    }
    data, index = b"", ""
    for headword, text in entries.items():
        index += f"{headword}\t{dict_digits(len(data))}\t{dict_digits(len(text.encode()))}\n"
        data += text.encode()
    index += f"mammal\t{dict_digits(len(entries['00-database-info']) + 10)}\tE\n"  # inside another entry
    (tmp_path / "a.index").write_text(index)
    found = read("dict", tmp_path / "a.dict.dz", data)
    assert [name.partition("@")[0] for name, _ in found] == ["whale", "öl"]
    assert found[0][1] == "whale Whale, n.\n   A mammal of the sea."
    assert found[1][1].endswith("x" * 70)


def test_a_dictionary_without_its_index_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no index 'a\.index'"):
        read("dict", tmp_path / "a.dict.dz", "text")


def test_a_commentary_yields_its_blocks(tmp_path):
    blocks = ['<chapter n="1"/><title>Psalm 1</title> <hi type="italic">Blessed</hi> &amp; happy.<p/>More.', "Two."]
    packed = [zlib.compress(block.encode()) for block in blocks]
    (tmp_path / "ot.czz").write_bytes(b"".join(packed))
    index = struct.pack("<III", 0, len(packed[0]), len(blocks[0]))
    index += struct.pack("<III", len(packed[0]), len(packed[1]), 4)
    assert read("sword", tmp_path / "ot.czs", index) == [("0", "Psalm 1\n\nBlessed & happy.\n\nMore."), ("1", "Two.")]


def test_text_that_is_no_utf_8_is_latin_1(tmp_path):
    assert read("rest", tmp_path / "a.rst", "caf\xe9".encode("latin-1")) == [("", "café")]
