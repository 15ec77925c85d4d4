"""Where the documents of a row begin and end."""


def document_bounds(idx, start: int, response: int) -> tuple:
    """Finds the documents in tokens idx (B, T), an int64 tensor. A document runs from one `start` to the
    next. Returns, for each token, the number of its document in the row, the document's first position, and
    the position of the document's <|response|> or −1: int64 (B, T) each.
    """
    import torch
    T = idx.size(1)
    t = torch.arange(T, device=idx.device).expand_as(idx)
    number = (idx == start).cumsum(1)
    first = torch.where(idx == start, t, 0).cummax(1).values
    # the last <|response|> up to each position, and the first from it on; plain text contains none
    before = torch.where(idx == response, t, -1).cummax(1).values
    after = torch.where(idx == response, t, T - 1).flip(1).cummin(1).values.flip(1)
    follows = (idx.gather(1, after) == response) & (number.gather(1, after) == number)
    return number, first, torch.where(before >= first, before, torch.where(follows, after, -1))
