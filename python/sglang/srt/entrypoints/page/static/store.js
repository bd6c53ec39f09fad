/* Conversations, kept in the browser's IndexedDB; in memory where there is none (private windows). */

const NAME = "sglang-page";
const TABLE = "conversations";

let database = null;
const inMemory = new Map();

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

export async function openStore() {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    database = await finished(opening);
  } catch {
    database = null;
  }
}

const table = (mode) => database.transaction(TABLE, mode).objectStore(TABLE);

/** All conversations, the last changed first. */
export async function allConversations() {
  const all = database ? await finished(table("readonly").getAll()) : [...inMemory.values()];
  return all.sort((a, b) => b.updated - a.updated);
}

export async function saveConversation(conversation) {
  if (database) await finished(table("readwrite").put(conversation));
  else inMemory.set(conversation.id, structuredClone(conversation));
}

export async function deleteConversation(id) {
  if (database) await finished(table("readwrite").delete(id));
  else inMemory.delete(id);
}

export async function deleteAllConversations() {
  if (database) await finished(table("readwrite").clear());
  else inMemory.clear();
}

/** A new conversation, not saved yet. */
export function newConversation(parameters) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [], parameters: { ...parameters } };
}

/** A small setting of the page; the browser may refuse to keep it. */
export const settings = {
  get(name, otherwise) {
    try {
      return localStorage.getItem(`sglang.${name}`) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`sglang.${name}`, value);
    } catch {
      /* then it holds until the page is closed */
    }
  },
};
