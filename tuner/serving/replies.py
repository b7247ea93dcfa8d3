"""What of a server's store answers requests again, or says where they belong."""

from __future__ import annotations

import time

from tuner.serving.tables import StoredReply, Tables


class Replies(Tables):
    """Replies by their idempotency keys, responses and conversations that go on, applications.

    What is asked for a session raises LookupError where there is none of that id.

    Attributes:
        owners: Changes where a key may have got another owner, or none.
    """

    owners = 0

    def number_of(self, id_: str) -> int:
        """The row of a session.

        Raises:
            LookupError: There is none of this id.
        """
        found = self.ask("SELECT number FROM sessions WHERE id = ?", id_)
        if not found:
            raise LookupError(f"there is no session {id_}")
        return int(found[0][0])

    def reply(self, id_: str, key: str) -> StoredReply | None:
        """What a session's request with this idempotency key was answered, if it was kept."""
        found = self.ask(
            "SELECT request, body, content_type FROM replies WHERE session = ? AND key = ?",
            self.number_of(id_),
            key,
        )
        return StoredReply(*found[0]) if found else None

    def keep_reply(self, id_: str, key: str, reply: StoredReply) -> None:
        """Keep what a session's request with an idempotency key is answered."""
        self.change(
            "INSERT OR REPLACE INTO replies (session, key, request, body, content_type, given) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            self.number_of(id_),
            key,
            reply.request,
            reply.body,
            reply.content_type,
            time.time(),
        )

    def forget_replies(self, given_before: float) -> None:
        """Delete the replies that were kept before a moment; Unix time."""
        self.change("DELETE FROM replies WHERE given < ?", given_before)

    def retried(self, id_: str, request: str) -> None:
        """A session's request whose answer was not kept is sampled again: its calls, if there are
        any, were not delivered."""
        number, where = self.number_of(id_), "session = ? AND request = ? AND NOT undelivered"
        if self.ask(f"SELECT 1 FROM calls WHERE {where} LIMIT 1", number, request):
            self.change(f"UPDATE calls SET undelivered = 1 WHERE {where}", number, request)

    def session_of_request(self, application: str, request: str) -> str | None:
        """The latest session of an application with a call of this idempotency key, or None."""
        found = self.ask(
            "SELECT sessions.id FROM calls JOIN sessions ON sessions.number = calls.session "
            "WHERE sessions.application = ? AND calls.request = ? ORDER BY calls.number DESC "
            "LIMIT 1",
            application,
            request,
        )
        return found[0][0] if found else None

    def keep_response(self, id_: str, response: str, data: str) -> None:
        """Keep a response of the Responses API, that a session can go on from.

        Args:
            id_: The session's.
            response: The response's id.
            data: What is kept, as text.
        """
        self.change(
            "INSERT OR REPLACE INTO responses (id, session, data) VALUES (?, ?, ?)",
            response,
            self.number_of(id_),
            data,
        )

    def response(self, id_: str, response: str) -> str | None:
        """What `keep_response` kept for a session, or None."""
        found = self.ask(
            "SELECT data FROM responses WHERE id = ? AND session = ?", response, self.number_of(id_)
        )
        return found[0][0] if found else None

    def session_of_response(self, application: str, response: str) -> str | None:
        """The open session of an application that this response is kept for, or None."""
        found = self.ask(
            "SELECT sessions.id FROM responses JOIN sessions "
            "ON sessions.number = responses.session "
            "WHERE responses.id = ? AND application = ? AND ended IS NULL",
            response,
            application,
        )
        return found[0][0] if found else None

    def session_of_name(self, application: str, name: str) -> str | None:
        """The session that an application calls so, or None."""
        found = self.ask(
            "SELECT id FROM sessions WHERE application = ? AND name = ?", application, name
        )
        return found[0][0] if found else None

    def go_on(self, application: str, talk: bytes) -> str | None:
        """The open session of an application in which a conversation was recorded, or None.

        Of several with the same words the one that went on from there least often, so that two
        conversations that began alike stay two.

        Args:
            talk: Digest of the conversation, the assistant's latest turn included.
        """
        found = self.ask(
            "SELECT calls.number, sessions.id FROM calls "
            "JOIN sessions ON sessions.number = calls.session "
            "WHERE talk = ? AND application = ? AND ended IS NULL AND NOT undelivered "
            "ORDER BY continued, calls.number LIMIT 1",
            talk,
            application,
        )
        for number, id_ in found:
            self.change("UPDATE calls SET continued = continued + 1 WHERE number = ?", number)
            return str(id_)
        return None

    def add_application(self, name: str, key: bytes) -> bool:
        """A new application; False: there is one of this name.

        Args:
            key: Digest of its key.
        """
        self.owners += 1
        query = "INSERT OR IGNORE INTO applications (name, key, made) VALUES (?, ?, ?)"
        return self.change(query, name, key, time.time()).rowcount > 0

    def applications(self) -> list[tuple[str, float]]:
        """Name of each application, and when it was made; Unix time."""
        return [(name, made) for name, made in self.ask("SELECT name, made FROM applications")]

    def application_of_key(self, key: bytes) -> str | None:
        """The application whose key has this digest, or None."""
        found = self.ask("SELECT name FROM applications WHERE key = ?", key)
        return found[0][0] if found else None

    def delete_application(self, name: str) -> bool:
        """Take an application's key out of service; its sessions stay. Whether it was there."""
        self.owners += 1
        return self.change("DELETE FROM applications WHERE name = ?", name).rowcount > 0
