"""Where the documents of a row begin and where their responses are."""

import torch

from ops.documents import document_bounds


def test_bounds_of_whole_and_cut_documents():
    """7 starts a document and 8 a response. The first document has lost its start, the last its response."""
    row = [1, 8, 2, 7, 3, 8, 4, 7, 7, 5, 8, 8, 7, 6]
    number, first, response = document_bounds(torch.tensor([row, [1] * 14]), 7, 8)
    assert number.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4, 4], [0] * 14]
    assert first.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7, 8, 8, 8, 8, 12, 12], [0] * 14]
    assert response.tolist() == [[1, 1, 1, 5, 5, 5, 5, -1, 10, 10, 10, 11, -1, -1], [-1] * 14]
