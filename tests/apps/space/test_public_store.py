"""Visitors name datastores that anybody may read, and no others."""

from __future__ import annotations

import pytest
from hub_server import TOKEN

from hf_refspec import Datastore
from hf_refspec.apps.space.conversation import Conversation, Host

REPO = "owner/store"


def test_a_public_datastore_is_drafted_from(host, store, hub):
    Datastore(store).push_to_hub(REPO)
    race = Conversation().ask(host, "abcabcabc", REPO, 8)
    assert race.sources[-1] == "DatastoreDrafts"


def test_one_that_is_not_there_is_told(host, hub):
    with pytest.raises(OSError, match="there is no public dataset repo 'owner/store' on the Hub"):
        host.drafter(REPO)


def test_a_private_one_is_the_hosts_alone_even_when_it_has_been_downloaded(host, store, hub):
    Datastore(store).push_to_hub(REPO, private=True, token=TOKEN)
    own = Host(host.model, host.tokenizer, REPO)
    assert len(own.drafter(REPO).drafters) == 3
    with pytest.raises(OSError, match=REPO):
        host.drafter(REPO)


@pytest.mark.parametrize("name", ["nonsense", "../etc", "/etc", "a/b/c", "org/..", "-/.", "a b/c"])
def test_what_is_no_hub_id_is_refused(host, name):
    with pytest.raises(ValueError, match="organisation/name"):
        host.drafter(name)


def test_a_folder_of_the_host_is_refused(host, store, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="does not name a datastore on the Hub"):
        host.drafter(store)
    (tmp_path / "owner" / "store").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not name a datastore on the Hub"):
        host.drafter(REPO)
