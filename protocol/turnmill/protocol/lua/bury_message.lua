-- Moves a message that nobody can decide on to the dead letters, and tells its sender. It happens once: a message that
-- was acknowledged meanwhile is left alone.
--
-- KEYS   1 stream that the message was read from, 2 dead letters, 3 stream of the answer to its sender (only where there
--        is one)
-- ARGV   group, id of the entry in 1, most letters to keep, '1' to write also what is acknowledged already, earlier
--        attempts, now_ms, lifetime of the answer in ms, the answer's body before and behind the letter's name, the
--        name's part before the entry id; then names and values of the letter's fields
-- Returns  the letter's id, nil where none was written
local call = redis.call
local source, dead, answer = KEYS[1], KEYS[2], KEYS[3]
local group, entry, now = ARGV[1], ARGV[2], ARGV[6]
local pending = redis.pcall('XPENDING', source, group, entry, entry, 1)
local is_pending = not pending.err and #pending > 0
if not is_pending and ARGV[4] ~= '1' then return false end
local attempts = ARGV[5] + (is_pending and pending[1][4] or 1)
local letter = call('XADD', dead, 'MAXLEN', '~', ARGV[3], '*', 'attempts', attempts, unpack(ARGV, 11))
redis.pcall('XACK', source, group, entry)
redis.pcall('XDEL', source, entry)
if answer then
  local body = ARGV[8] .. ARGV[10] .. letter .. ARGV[9]
  local number = call('XADD', answer, '0-*', 't', 'answer', 'd', body, 'at', now)
  call('PEXPIRE', answer, ARGV[7])
  call('SPUBLISH', answer, string.sub(number, 3) .. ' ' .. now .. ' answer ' .. #body .. '\n' .. body)
end
return letter
