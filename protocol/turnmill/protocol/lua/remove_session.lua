-- Removes a part of what a deleted session has left. A name leaves the removal behind what it names, so any process may go
-- on at any time, whatever became of the last call. A session that has begun anew under the same name is not touched:
-- nothing here is found by that name. Keys are made from base, the partition's prefix, and are not passed.
--
-- KEYS   1 the partition's removals (a set of names of such sets), 2 the removal: a set of names behind base, 3 inbox,
--        4 the index of turns, 5 timers
-- ARGV   base, most names to look at (2 or more), what a channel's name has behind its turn's, the beginning of a stopped
--        turn's marker, and of each further key of a session
-- Returns  1 where something is left, else 0
local call, base, most = redis.call, ARGV[1], ARGV[2] + 0

local function remove_turn(name)
  -- The key that stands for a turn goes with its record, so that no caller is led to a turn that is half gone.
  local turn, fields = string.sub(name, 6), redis.pcall('HKEYS', base .. name)
  for _, field in ipairs(fields.err and {} or fields) do
    if string.match(field, '^idempotency:') then call('UNLINK', base .. field) end
  end
  call('UNLINK', base .. name, base .. name .. ARGV[3])
  call('ZREM', KEYS[4], turn)
  -- The marker stays for its time, because a worker may still come upon a call of the turn; its reason is the session's.
  if call('EXISTS', base .. ARGV[4] .. turn) == 1 then
    call('SET', base .. ARGV[4] .. turn, 'the session was deleted', 'XX', 'KEEPTTL')
  end
end

local function is_idle(record)
  -- The state is an array: the transcript's length, the live turn, the turns that wait, ...
  local readable, state = pcall(cmsgpack.unpack, record)
  return readable and type(state) == 'table' and not state[2] and #(state[3] or {}) == 0
end

local function remove_sub_session(name)
  local session = string.sub(name, 9)
  local record = redis.pcall('HGET', base .. name, 's')
  if type(record) ~= 'string' or not is_idle(record) then
    -- It runs, or its start is still on its way: it is asked to go like any other session, behind that.
    call('XADD', KEYS[3], '*', 't', 'delete_session', 'd', cjson.encode({ session_id = session, request_id = '' }))
    return
  end
  call('SADD', KEYS[2], 'blobs:' .. session, 'owned:' .. session)
  call('UNLINK', base .. name)
  for index = 5, #ARGV do call('UNLINK', base .. ARGV[index] .. session) end
  call('ZREM', KEYS[5], session)
end

local is_container = { removed = true, owned = true, blobs = true }
local function kind_of(name) return string.match(name, '^[^:]+') end

local function remove(name)
  local kind = kind_of(name)
  if kind == 'turn' then
    remove_turn(name)
  elseif kind == 'session' then
    remove_sub_session(name)
  elseif is_container[kind] then
    call('SADD', KEYS[2], name)
  else
    call('UNLINK', base .. name)
  end
end

local names = call('SRANDMEMBER', KEYS[2], math.floor(most / 2))
local room = most - #names

local function empty(name)
  -- A set or sorted set of further names; whether nothing is left of it.
  local key, found, forget = base .. name, {}, 'SREM'
  local type_of_key = call('TYPE', key).ok
  if type_of_key == 'set' then
    if room > 0 then found = call('SRANDMEMBER', key, room) end
  elseif type_of_key == 'zset' then
    if room > 0 then found, forget = call('ZRANGE', key, 0, room - 1), 'ZREM' end
  else
    call('UNLINK', key)
  end
  room = room - #found
  for _, further in ipairs(found) do
    remove(further)
    call(forget, key, further)
  end
  return call('EXISTS', key) == 0
end

for _, name in ipairs(names) do
  local is_gone = true
  if is_container[kind_of(name)] then is_gone = empty(name) else remove(name) end
  if is_gone then call('SREM', KEYS[2], name) end
end
if call('EXISTS', KEYS[2]) == 1 then return 1 end
call('SREM', KEYS[1], string.sub(KEYS[2], #base + 1))
return 0
